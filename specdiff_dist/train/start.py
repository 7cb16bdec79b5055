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
from specdiff_dist.train.features import check_layers
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
    verifier_layers: tuple[int, ...]  # what they were in the verifier; (): not known
    folder: Path  # the verifier's


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
    return Start(
        config, weights, embedding, output, read_config(folder).get("model_type", "verifier"), chosen, chosen, folder
    )


def from_drafter(folder: Path, verifier_folder: Path, *, layers: Sequence[int] | None = None, block_size: int) -> Start:
    """Goes on from an exported drafter; `layers` keeps only those of it. Raises as `from_verifier`."""
    config = BlockModelConfig.read(folder)
    embedding, output = read_embeddings(verifier_folder)
    if embedding.shape != (config.vocab_size, config.hidden_size):
        raise InvalidConfig(f"drafter {folder} was trained for another verifier than {verifier_folder.name}")
    num_layers = config.num_hidden_layers
    chosen = tuple(range(num_layers) if layers is None else layers)
    _check(chosen, num_layers, folder.name)
    found = load_weights(folder)
    names = {name: name for name in ("model.norm.weight", "mask_embedding")}
    if config.feature_layers:
        names |= {name: name for name in ("feature_norm.weight", "feature_fusion.weight")}
    for own, theirs in enumerate(chosen):
        names |= {f"{_LAYER}{own}.{name}": f"{_LAYER}{theirs}.{name}" for name in _names_of_layer()}
    missing = [name for name in names.values() if name not in found]
    if missing:
        raise ModelUnavailable(f"{folder} lacks the tensor {missing[0]}")
    weights = {own: found[theirs].float() for own, theirs in names.items()}
    sources = tuple(config.feature_sources[layer] for layer in chosen) if config.feature_layers else ()
    config = replace(config, num_hidden_layers=len(chosen), max_block_size=block_size, feature_sources=sources)
    known = read_config(folder).get("verifier_layers") or ()
    began_as = tuple(known[layer] for layer in chosen) if len(known) == num_layers else ()
    return Start(config, weights, embedding, output, folder.name, chosen, began_as, verifier_folder)


def with_features(start: Start, layers: Sequence[int] | None) -> Start:
    """The same layers, fed the verifier's features instead of a causal stream of their own; masks and blocks as before. A
    trained drafter's may go on so, too.

    layers: the verifier's, by their outputs; None takes for each of the network's layers the one whose output went into it
    in the verifier. Each layer starts from the output nearest in depth to what it was made for, and the fusion is zero: with
    the layers by default the keys and values of the prefix are the verifier's own before the first step.
    Raises InvalidConfig when no layer is left, for one that is not there, and for a drafter that does not tell what its
    layers were.
    """
    if not start.verifier_layers:
        raise InvalidConfig(f'{start.origin} has no "verifier_layers" in its config.json: which features go where?')
    num_layers = read_config(start.folder)["num_hidden_layers"]
    feeding = tuple(sorted({layer - 1 for layer in start.verifier_layers if layer})) or (num_layers // 2,)
    chosen = feeding if layers is None else tuple(layers)
    check_layers(chosen, num_layers, start.folder.name)
    entering = [-1, *chosen]  # what could feed a layer: the embedding, or an output
    sources = tuple(
        min(range(len(entering)), key=lambda at: (abs(entering[at] - (own - 1)), -at)) - 1
        for own in start.verifier_layers
    )
    config = replace(start.config, feature_layers=chosen, feature_sources=sources)
    weights = {
        **start.weights,
        "feature_norm.weight": torch.ones(config.feature_size),
        "feature_fusion.weight": torch.zeros(config.hidden_size, config.feature_size),
    }
    return replace(start, config=config, weights=weights)


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
