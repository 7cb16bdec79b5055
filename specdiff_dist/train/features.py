"""The verifier's features of the answers on disk: computed once, then read through memory maps.

FOLDER/<layers>/shard-00000-<crc>.npy is float16 [tokens of the shard of answers, F · H]; the checksum is that of the
shard's tokens, so features of answers that were made anew are made anew, too. A crash leaves a shard absent, never half.
A token takes 2 · F · H bytes: 3.4 kB for three layers of SmolLM2.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdiff_dist.errors import InvalidConfig
from specdiff_dist.train.answers import AnswerStore
from specdiff_dist.verifiers.forward import forward_one

_ModelForward = Any  # verifiers.causal_lm.ModelForward of whatever cache


class FeatureStore:
    """Features of all answers of a store, by the answer's index."""

    def __init__(self, folder: Path, answers: AnswerStore, size: int) -> None:
        """folder: where `make_features` wrote those of `answers`; size: F · H. Raises InvalidConfig when some are missing."""
        self._shards: list[NDArray[np.float16]] = []
        self._starts: list[tuple[int, int, int]] = []  # of each answer: shard, first and last row
        for number in range(answers.num_shards):
            lengths = [len(answers.answer(index).token_ids) for index in answers.shard_range(number)]
            rows = _open(shard_path(folder, answers, number), (sum(lengths), size))
            ends = np.cumsum([0, *lengths]).tolist()
            self._shards.append(rows)
            self._starts += [(number, start, end) for start, end in pairwise(ends)]

    def of(self, index: int) -> NDArray[np.float16]:
        """[tokens of the answer with its prompt, F · H]; a view of the file."""
        number, start, end = self._starts[index]
        return self._shards[number][start:end]


def make_features(
    folder: Path,
    answers: AnswerStore,
    verifier_folder: Path,
    layers: tuple[int, ...],
    *,
    dtype: str = "auto",
    device: torch.device,
    rank: int = 0,
    world: int = 1,
    on_progress: Callable[[dict[str, Any]], None] = lambda line: None,
) -> Path:
    """Computes what is not there yet, every `world`-th shard from `rank` on; returns the folder of these layers.

    dtype: of the verifier; auto: bfloat16 on a GPU, else float32. Raises InvalidConfig for layers that the verifier does
    not have, ModelUnavailable.
    """
    from specdiff_dist.verifiers import load_forward

    folder = folder / "-".join(map(str, layers))
    folder.mkdir(parents=True, exist_ok=True)
    own = range(rank, answers.num_shards, world)
    missing = [number for number in own if not shard_path(folder, answers, number).exists()]
    if not missing:
        return folder
    dtype = ("float32" if device.type == "cpu" else "bfloat16") if dtype == "auto" else dtype
    model = load_forward(verifier_folder, dtype, str(device))
    check_layers(layers, model.num_layers, verifier_folder.name)
    if rank == 0:
        about = {"layers": list(layers), "hidden_size": model.hidden_size, "dtype": dtype}
        (folder / "meta.json").write_text(json.dumps(about) + "\n", encoding="utf-8")
    total, done = sum(len(answers.shard_range(number)) for number in missing), 0
    for number in missing:
        path, indices = shard_path(folder, answers, number), answers.shard_range(number)
        size = (sum(len(answers.answer(index).token_ids) for index in indices), len(layers) * model.hidden_size)
        temporary = path.with_suffix(".tmp")
        rows, at = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.float16, shape=size), 0
        for index in indices:
            token_ids = answers.answer(index).token_ids
            rows[at : at + len(token_ids)] = _features(model, token_ids, layers)
            at += len(token_ids)
            done += 1
            on_progress({"event": "features", "done": done, "total": total})
        rows.flush()
        del rows
        os.replace(temporary, path)
    return folder


def check_layers(layers: tuple[int, ...], num_layers: int, verifier: str) -> None:
    """Raises InvalidConfig for layers that a verifier does not have."""
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= num_layers:
        raise InvalidConfig(
            f"feature layers must be different ones of 0 … {num_layers - 1} of {verifier}, not {list(layers)}"
        )


def shard_path(folder: Path, answers: AnswerStore, number: int) -> Path:
    crc = 0
    for index in answers.shard_range(number):
        crc = zlib.crc32(answers.answer(index).token_ids.astype("<i4").tobytes(), crc)
    return folder / f"shard-{number:05d}-{crc:08x}.npy"


def _features(model: _ModelForward, token_ids: NDArray[np.int32], layers: tuple[int, ...]) -> NDArray[np.float16]:
    """As a verifier of this precision gives them, then as float16."""
    _, states = forward_one(model, model.new_cache(), token_ids, 1, layers)
    assert states is not None
    largest = torch.finfo(torch.float16).max
    return states.float().clamp(-largest, largest).half().cpu().numpy()


def _open(path: Path, shape: tuple[int, int]) -> NDArray[np.float16]:
    try:
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InvalidConfig(
            f"cannot read the features in {path}: {error}; remove it, and it will be made again"
        ) from error
    if rows.dtype != np.float16 or rows.shape != shape:
        raise InvalidConfig(f"{path} holds {rows.dtype} {list(rows.shape)}, not float16 {list(shape)}; remove it")
    return rows
