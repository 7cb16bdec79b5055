"""What can be read from a verifier's folder without loading the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from specdiff_dist.errors import ModelUnavailable

if TYPE_CHECKING:
    from torch import Tensor


def read_config(folder: Path) -> dict[str, Any]:
    """config.json. Raises ModelUnavailable."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"cannot read {folder / 'config.json'}: {error}") from error


def real_vocab_size(folder: Path) -> int | None:
    """1 + the largest id the folder's tokenizer knows; None without a tokenizer.json.

    Output matrices are padded to round sizes; an id that no text has must never be emitted.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    largest = max(vocab.values()) if isinstance(vocab, dict) else len(vocab) - 1  # Unigram has a list
    return 1 + max([largest, *(token["id"] for token in content.get("added_tokens", []))])


def vocab_size(folder: Path) -> int:
    """Tokens that the verifier in `folder` can emit. Raises ModelUnavailable."""
    config = read_config(folder)
    padded = int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    return min(padded, real_vocab_size(folder) or padded)


def read_tensor(folder: Path, name: str) -> Tensor | None:
    """One tensor of the folder's safetensors, single file or sharded; None if there is no such tensor.

    Raises ModelUnavailable when the folder has no safetensors or they cannot be read.
    """
    index = folder / "model.safetensors.index.json"
    try:
        file_name = "model.safetensors"
        if index.exists():
            file_name = json.loads(index.read_text(encoding="utf-8"))["weight_map"].get(name)
            if file_name is None:
                return None
        with safe_open(folder / file_name, framework="pt") as tensors:
            return tensors.get_tensor(name) if name in tensors.keys() else None  # noqa: SIM118 (not a dict)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelUnavailable(f"cannot read the weights in {folder}: {error}") from error


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors, single file or sharded. Raises ModelUnavailable."""
    index = folder / "model.safetensors.index.json"
    try:
        names = {"model.safetensors"}
        if index.exists():
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        tensors: dict[str, Tensor] = {}
        for name in sorted(names):
            with safe_open(folder / name, framework="pt") as file:
                tensors.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118 (not a dict)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelUnavailable(f"cannot read the weights in {folder}: {error}") from error
    return tensors


def read_embeddings(folder: Path) -> tuple[Tensor, Tensor]:
    """(input embedding, output matrix), both [V, H]; the same tensor where they are tied. Raises ModelUnavailable."""
    embedding = read_tensor(folder, "model.embed_tokens.weight")
    if embedding is None:
        raise ModelUnavailable(f"{folder} has no tensor model.embed_tokens.weight; is it a causal language model?")
    output = read_tensor(folder, "lm_head.weight")
    return embedding, embedding if output is None else output
