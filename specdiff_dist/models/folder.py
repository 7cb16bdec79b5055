"""A model folder in the layout of transformers, and what it says about itself."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdiff_dist.errors import InvalidRequest, ModelUnavailable
from specdiff_dist.models.files import read_chat_template, read_json
from specdiff_dist.types import SamplingParams

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
CONTEXT_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A checked folder: config.json, tokenizer.json and complete safetensors are there.

    Its config may name Python code of its own (`auto_map`); nothing runs it, and loaders pass trust_remote_code=False.
    """

    name: str  # public: what /v1/models lists
    path: Path
    eos_token_ids: tuple[int, ...]
    max_model_len: int  # tokens, prompt and answer together
    default_sampling: SamplingParams  # where a request says nothing
    has_chat_template: bool


def read_folder(path: Path, name: str) -> ModelFolder:
    """Checks the folder and reads its facts; takes milliseconds, loads no weights.

    Raises ModelUnavailable that names the missing or broken file.
    """
    if not path.is_dir():
        raise ModelUnavailable(f"{path} is no folder; give the folder that holds the model's config.json")
    for file in ("config.json", "tokenizer.json"):
        if not (path / file).is_file():
            raise ModelUnavailable(
                f"{path} has no {file}; save_pretrained() both the model and its fast tokenizer into it with transformers"
            )
    for file in _weight_files(path):
        _check_safetensors(path / file)
    config = read_json(path / "config.json")
    generation = read_json(path / "generation_config.json")
    return ModelFolder(
        name=name,
        path=path,
        eos_token_ids=_eos_token_ids(config, generation),
        max_model_len=_max_model_len(path, config),
        default_sampling=_default_sampling(path, generation),
        has_chat_template=read_chat_template(path) is not None,
    )


def _weight_files(path: Path) -> list[str]:
    if (path / WEIGHTS).is_file():
        return [WEIGHTS]
    shards = read_json(path / WEIGHTS_INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ModelUnavailable(
            f"{path} has no {WEIGHTS} and no {WEIGHTS_INDEX}; weights in other formats are not read: "
            "load them once with transformers and save_pretrained()"
        )
    return sorted(set(map(str, shards.values())))


def _check_safetensors(file: Path) -> None:
    """Compares the size with what the header promises, so that half a download is told from a model."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (header_length,) = struct.unpack("<Q", stream.read(8))
            if header_length > size - 8:
                raise ValueError(f"{size} bytes are less than its header")
            header = json.loads(stream.read(header_length))
        ends = [tensor["data_offsets"][1] for key, tensor in header.items() if key != "__metadata__"]
        expected = 8 + header_length + max(ends, default=0)
        if size != expected:
            raise ValueError(f"{size} bytes instead of {expected}")
    except FileNotFoundError as error:
        raise ModelUnavailable(f"{file.parent} has no {file.name}; fetch the model again") from error
    except (OSError, struct.error, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelUnavailable(f"{file} is damaged or incomplete ({error}); fetch the model again") from error


def _eos_token_ids(config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    for source in (generation, config, _text_config(config)):
        ids = source.get("eos_token_id")
        ids = ids if isinstance(ids, list) else [ids]
        found = tuple(dict.fromkeys(token_id for token_id in ids if isinstance(token_id, int)))
        if found:
            return found
    return ()


def _max_model_len(path: Path, config: dict[str, Any]) -> int:
    for source in (config, _text_config(config)):
        for key in CONTEXT_LENGTH_KEYS:
            value = source.get(key)
            if isinstance(value, int) and value > 0:
                return value
    raise ModelUnavailable(f"{path}/config.json states no context length; add max_position_embeddings to it")


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part in the config of a multimodal one."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else {}


def _default_sampling(path: Path, generation: dict[str, Any]) -> SamplingParams:
    """Temperature, top_k, top_p and min_p where generation_config.json states them, whatever `do_sample` is, as vLLM does."""

    def stated(key: str, default: float) -> float:
        value = generation.get(key)
        return default if value is None else value

    try:
        return SamplingParams(
            temperature=float(stated("temperature", 1.0)),
            top_k=max(0, int(stated("top_k", 0))),  # -1 is off, too
            top_p=float(stated("top_p", 1.0)),
            min_p=float(stated("min_p", 0.0)),
        )
    except (InvalidRequest, TypeError, ValueError) as error:
        raise ModelUnavailable(f"{path}/generation_config.json cannot be used: {error}; correct the value") from error
