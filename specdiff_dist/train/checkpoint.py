"""Checkpoints of a training run: one safetensors file, replaced atomically. No random state: batches are functions of the step."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdiff_dist.errors import ModelUnavailable


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """Everything a run goes on from."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]  # JSON: step, schedule, evaluations so far …

    def save(self, path: Path) -> None:
        """Writes beside `path`, then replaces it: a kill leaves the old file or the new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, temporary, metadata={"state": json.dumps(self.state)})
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)

    @staticmethod
    def load(path: Path) -> Checkpoint | None:
        """None where there is no checkpoint. Raises ModelUnavailable when it cannot be read."""
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                state = json.loads(file.metadata()["state"])
                return Checkpoint({name: file.get_tensor(name) for name in file.keys()}, state)  # noqa: SIM118
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ModelUnavailable(f"cannot read the checkpoint {path}: {error}; delete it to start over") from error


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Tensor]:
    """The optimizer's state of each parameter, by the parameter's name."""
    found = {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"optimizer.{key}.{name}"] = value
    return found


def restore_optimizer(optimizer: torch.optim.Optimizer, names: list[str], tensors: dict[str, Tensor]) -> None:
    """Puts back what `optimizer_tensors` gave."""
    state: dict[int, dict[str, Tensor]] = {}
    for full, tensor in tensors.items():
        kind, _, rest = full.partition(".")
        if kind == "optimizer":
            key, _, name = rest.partition(".")
            state.setdefault(names.index(name), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
