"""What a draft network starts from: layers of the verifier, or an earlier drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from specdiff_dist.drafters.block_model import BlockModelConfig
from specdiff_dist.drafters.weights_file import load_weights
from specdiff_dist.errors import InvalidConfig, ModelUnavailable
from specdiff_dist.verifiers.folder import read_config, read_embeddings, read_tensor

_LAYER = "model.layers."


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """Shape and first weights of a network, and where they come from."""

    config: BlockModelConfig
    weights: dict[str, Tensor]  # float32, named as in drafter.safetensors, without draft_vocab
    embedding: Tensor  # the verifier's, [V, H]
    output: Tensor  # the verifier's, [V, H]
    origin: str  # for the record
    layers: tuple[int, ...]  # of the origin


def from_verifier(folder: Path, *, num_layers: int, layers: Sequence[int] | None = None, block_size: int) -> Start:
    """Copies some of a Llama-like verifier's layers and its final norm; masks start as the mean token.

    layers: indices from 0; None picks the first, evenly spaced ones between, and the last.
    Raises InvalidConfig when the verifier has other parts than a draft network, or fewer layers; ModelUnavailable.
    """
    config = BlockModelConfig.read(folder)
    embedding, output = read_embeddings(folder)
    chosen = tuple(_evenly(config.num_hidden_layers, num_layers) if layers is None else layers)
    _check(chosen, config.num_hidden_layers, folder.name)
    weights = {"model.norm.weight": _read(folder, "model.norm.weight")}
    for own, theirs in enumerate(chosen):
        for name in _names_of_layer():
            weights[f"{_LAYER}{own}.{name}"] = _read(folder, f"{_LAYER}{theirs}.{name}")
    if read_tensor(folder, f"{_LAYER}0.self_attn.q_norm.weight") is not None:
        raise InvalidConfig(
            f"{folder.name} normalises its queries, which a draft network does not; use another verifier"
        )
    weights["mask_embedding"] = embedding.float().mean(dim=0)
    config = replace(config, num_hidden_layers=len(chosen), max_block_size=block_size)
    return Start(config, weights, embedding, output, read_config(folder).get("model_type", "verifier"), chosen)


def from_drafter(folder: Path, verifier_folder: Path, *, layers: Sequence[int] | None = None, block_size: int) -> Start:
    """Goes on from an exported drafter; `layers` keeps only those of it. Raises as `from_verifier`."""
    config = BlockModelConfig.read(folder)
    embedding, output = read_embeddings(verifier_folder)
    if embedding.shape != (config.vocab_size, config.hidden_size):
        raise InvalidConfig(f"drafter {folder} was trained for another verifier than {verifier_folder.name}")
    chosen = tuple(range(config.num_hidden_layers) if layers is None else layers)
    _check(chosen, config.num_hidden_layers, folder.name)
    found = load_weights(folder)
    names = {"model.norm.weight": "model.norm.weight", "mask_embedding": "mask_embedding"}
    for own, theirs in enumerate(chosen):
        names |= {f"{_LAYER}{own}.{name}": f"{_LAYER}{theirs}.{name}" for name in _names_of_layer()}
    missing = [name for name in names.values() if name not in found]
    if missing:
        raise ModelUnavailable(f"{folder} lacks the tensor {missing[0]}")
    weights = {own: found[theirs].float() for own, theirs in names.items()}
    config = replace(config, num_hidden_layers=len(chosen), max_block_size=block_size)
    return Start(config, weights, embedding, output, folder.name, chosen)


def _names_of_layer() -> list[str]:
    return [
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    ]


def _read(folder: Path, name: str) -> Tensor:
    tensor = read_tensor(folder, name)
    if tensor is None:
        raise InvalidConfig(f"{folder.name} has no {name}: a draft network can only start from a Llama-like verifier")
    return tensor.to(torch.float32)


def _check(layers: Sequence[int], available: int, name: str) -> None:
    if not layers or len(set(layers)) != len(layers) or min(layers) < 0 or max(layers) >= available:
        raise InvalidConfig(f"layers must be different ones of 0 … {available - 1} of {name}, not {list(layers)}")


def _evenly(available: int, count: int) -> list[int]:
    if count > available:
        raise InvalidConfig(f"the verifier has only {available} layers, not {count}")
    if count == 1:
        return [0]
    return [round(i * (available - 1) / (count - 1)) for i in range(count)]
