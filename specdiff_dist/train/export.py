"""The finished drafter: a folder that `--drafter FOLDER` loads, with a card that says how it was made."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor

from specdiff_dist.drafters.block_model import BlockModelConfig
from specdiff_dist.drafters.weights_file import in_8_bits
from specdiff_dist.train.calibrate import Calibration
from specdiff_dist.train.evaluation import Evaluation


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """What the model card states about one run."""

    verifier: str
    command: str
    origin: str  # what the first weights were taken from
    layers: tuple[int, ...]  # of the origin
    verifier_layers: tuple[int, ...]  # what they were in the verifier; (): not known
    data: dict[str, Any]  # meta.json of the answers
    num_answers: int
    options: dict[str, Any]
    num_steps: int
    num_blocks: int
    seconds: float
    stopped_early: bool
    machine: str
    before: Evaluation
    after: Evaluation
    calibration: Calibration


def export(
    folder: Path,
    config: BlockModelConfig,
    weights: dict[str, Tensor],
    draft_vocab: NDArray[np.int64] | None,
    record: Record,
    *,
    in_int8: bool = False,
) -> Path:
    """Writes config.json, drafter.safetensors (bfloat16, or matrices in 8 bits) and README.md; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    if draft_vocab is not None:
        tensors["draft_vocab"] = torch.from_numpy(draft_vocab.astype(np.int32))
    temporary = folder / "drafter.tmp"
    stored = in_8_bits(tensors) if in_int8 else tensors
    temporary.write_bytes(save(stored, metadata={"format": "pt"}))  # with the permissions of any other file
    os.replace(temporary, folder / "drafter.safetensors")
    _write(folder / "config.json", json.dumps(_config_json(config, record), indent=1) + "\n")
    _write(folder / "README.md", model_card(record, tensors, config, in_int8=in_int8))
    return folder


def model_card(record: Record, tensors: dict[str, Tensor], config: BlockModelConfig, *, in_int8: bool = False) -> str:
    """Markdown: data, recipe, command, time, numbers before and after."""
    num_parameters = sum(tensor.numel() for name, tensor in tensors.items() if name != "draft_vocab")
    vocab = tensors.get("draft_vocab")
    proposes = (
        "the whole vocabulary" if vocab is None else f"the {len(vocab)} most frequent tokens of its training answers"
    )
    before, after, found = record.before, record.after, record.calibration
    sources = ", ".join(str(source) for source in record.data.get("sources", []))
    lines = [
        f"# Diffusion drafter for {record.verifier}",
        "",
        "Licence: its layers began as the verifier's, so the verifier's licence applies.",
        "",
        f"**What it is.** `drafter.safetensors` ({'int8' if in_int8 else 'bfloat16'}, {num_parameters / 1e6:.1f} M "
        "parameters): a Llama body of "
        f"{len(record.layers)} layers, a final norm, and `mask_embedding`, the input vector of a masked position. It began as "
        f"layers {', '.join(map(str, record.layers))} of {record.origin}. {_about_features(config)}Token embedding and output matrix are the verifier's "
        f"own and are read from its folder, so it fits this verifier only. It proposes {proposes}.",
        "",
        f"**Data.** {record.num_answers} answers of the verifier itself (every 20th held out), sources: {sources}. "
        "`config.json` has their meta data under `training`.",
        "",
        f"**Recipe.** {record.num_steps} steps, {record.num_blocks} blocks, {record.seconds / 60:.1f} minutes on "
        f"{record.machine}{', stopped early' if record.stopped_early else ''}:",
        "",
        "```",
        record.command,
        "```",
        "",
        f"**Measured** on {after.num_blocks} blocks of held-out answers, one denoising step, everything masked:",
        "",
        _row(["block position", *(str(j + 1) for j in range(len(after.match)))]),
        _row(["---"] * (1 + len(after.match))),
        _row(["same most probable token, before", *map(_share, before.match)]),
        _row(["same most probable token, after", *map(_share, after.match)]),
        _row(["total variation at temperature 1, before", *map(_share, before.tv)]),
        _row(["total variation at temperature 1, after", *map(_share, after.tv)]),
        "",
        f"Expected accepted tokens of a block of {len(after.match)}: greedy {before.accepted_greedy:.2f} → "
        f"{after.accepted_greedy:.2f}, at temperature 1 {before.accepted_sampled:.2f} → {after.accepted_sampled:.2f}.",
        "",
        f"Calibration error (ECE) of the confidence as probability of a match, where reached, on answers not fitted on: "
        f"{found.ece_before:.3f} as it is, {found.ece_after:.3f} after the table in `config.json`; by position "
        f"{', '.join(f'{value:.3f}' for value in found.ece_by_position)}.",
        "",
    ]
    return "\n".join(lines)


def _about_features(config: BlockModelConfig) -> str:
    if not config.feature_layers:
        return ""
    layers = ", ".join(map(str, config.feature_layers))
    return (
        f"It reads committed tokens as the verifier's hidden states after its layers {layers} (from 0), which come with the "
        "verify replies. "
    )


def _config_json(config: BlockModelConfig, record: Record) -> dict[str, Any]:
    shape = asdict(config)
    rope_theta = shape.pop("rope_theta")
    return {
        "model_type": "specdiff_block_diffusion",
        **shape,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "initial_weights": record.origin,
        "initial_layers": list(record.layers),
        "verifier_layers": list(record.verifier_layers),
        "calibration": record.calibration.as_json(),
        "training": {
            "verifier": record.verifier,
            "command": record.command,
            "machine": record.machine,
            "num_steps": record.num_steps,
            "num_blocks": record.num_blocks,
            "seconds": round(record.seconds, 1),
            "stopped_early": record.stopped_early,
            "options": record.options,
            "num_answers": record.num_answers,
            "data": record.data,
            "before": record.before.as_json(),
            "after": record.after.as_json(),
        },
    }


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _share(value: float) -> str:
    return f"{value:.2f}".removeprefix("0")
