"""The verifier's answers on disk: shards of arrays, written whole or not at all."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdiff_dist.core.rows import IntArray
from specdiff_dist.errors import InvalidConfig

META = "meta.json"
TOP = 32
HELD_OUT_EVERY = 20

_FIELDS = {
    "token_ids": np.int32,  # [total] prompt with chat template, then the answer with its end token if it ended
    "row_splits": np.int64,  # [n + 1]
    "prompt_lengths": np.int32,  # [n]
    "top_ids": np.int32,  # [answer tokens, TOP], descending
    "top_log_probs": np.float16,  # [answer tokens, TOP], the law each answer token was drawn from, at temperature 1
    "sources": np.uint8,  # [n] index into meta["sources"]
}


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer with its prompt."""

    token_ids: IntArray  # int32 [prompt + t]
    prompt_length: int
    top_ids: IntArray  # int32 [t, TOP]; row i belongs to token_ids[prompt_length + i]
    top_log_probs: np.ndarray  # float16 [t, TOP], natural logarithms
    source: int  # index into meta["sources"]

    @property
    def answer_ids(self) -> IntArray:
        return self.token_ids[self.prompt_length :]


def is_held_out(index: int) -> bool:
    """Answers that are measured on and never trained on."""
    return index % HELD_OUT_EVERY == 0


class AnswerStore:
    """All answers of a data folder, read when first asked for and then kept: some 200 bytes a token.

    Only the unbroken run of shards from the first on counts, so that an answer's index never changes as shards are added.
    """

    def __init__(self, folder: Path, meta: dict[str, Any], counts: Sequence[int]) -> None:
        self.folder, self.meta = folder, meta
        self._ends = np.cumsum([0, *counts])
        self._shards: dict[int, dict[str, np.ndarray]] = {}

    @classmethod
    def open(cls, folder: Path) -> AnswerStore:
        """Raises InvalidConfig when the folder holds no answers, or damaged ones."""
        meta = read_meta(folder)
        if meta is None:
            raise InvalidConfig(f"{folder} has no {META}; `specdiff train-drafter` makes the answers")
        counts = []
        while (path := shard_path(folder, len(counts))).exists():
            counts.append(len(_array(path, "prompt_lengths")))
        return cls(folder, meta, counts)

    @property
    def num_shards(self) -> int:
        return len(self._ends) - 1

    @property
    def num_answers(self) -> int:
        return int(self._ends[-1])

    def answer(self, index: int) -> Answer:
        """Raises IndexError."""
        if not 0 <= index < self.num_answers:
            raise IndexError(f"there are {self.num_answers} answers, no number {index}")
        number = int(np.searchsorted(self._ends, index, side="right")) - 1
        shard = self._shard(number)
        row = index - int(self._ends[number])
        start, end = shard["row_splits"][row : row + 2]
        first, last = shard["answer_splits"][row : row + 2]
        return Answer(
            shard["token_ids"][start:end],
            int(shard["prompt_lengths"][row]),
            shard["top_ids"][first:last],
            shard["top_log_probs"][first:last],
            int(shard["sources"][row]),
        )

    def shard_range(self, number: int) -> range:
        """The answers in one shard."""
        return range(int(self._ends[number]), int(self._ends[number + 1]))

    def prompts(self, source: int) -> Iterator[IntArray]:
        """The prompts of one source, int32; reads nothing else."""
        for number in range(self.num_shards):
            path = shard_path(self.folder, number)
            token_ids, starts = _array(path, "token_ids"), _array(path, "row_splits")
            lengths, sources = _array(path, "prompt_lengths"), _array(path, "sources")
            for row in np.flatnonzero(sources == source):
                yield token_ids[starts[row] : starts[row] + lengths[row]]

    def _shard(self, number: int) -> dict[str, np.ndarray]:
        if number not in self._shards:
            shard = read_shard(self.folder, number)
            lengths = np.diff(shard["row_splits"]) - shard["prompt_lengths"]
            shard["answer_splits"] = np.concatenate([[0], np.cumsum(lengths)])
            self._shards[number] = shard
        return self._shards[number]


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.npz"


def write_shard(folder: Path, number: int, answers: Sequence[Answer]) -> None:
    """Writes shard `number` whole: a crash leaves it absent, never half. The same answers give the same bytes."""
    lengths = [len(answer.token_ids) for answer in answers]
    arrays = {
        "token_ids": _joined([answer.token_ids for answer in answers], ()),
        "row_splits": np.cumsum([0, *lengths]),
        "prompt_lengths": np.array([answer.prompt_length for answer in answers]),
        "top_ids": _joined([answer.top_ids for answer in answers], (TOP,)),
        "top_log_probs": _joined([answer.top_log_probs for answer in answers], (TOP,)),
        "sources": np.array([answer.source for answer in answers]),
    }
    path = shard_path(folder, number)
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as stream:
        np.savez(stream, allow_pickle=False, **{name: arrays[name].astype(_FIELDS[name]) for name in _FIELDS})
    os.replace(temporary, path)


def read_shard(folder: Path, number: int) -> dict[str, np.ndarray]:
    """The arrays of a shard. Raises InvalidConfig when it is damaged."""
    return {name: _array(shard_path(folder, number), name) for name in _FIELDS}


def read_meta(folder: Path) -> dict[str, Any] | None:
    """What the answers were made from; None if the folder holds none. Raises InvalidConfig when it is damaged."""
    path = folder / META
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"cannot read {path}: {error}; remove {folder} to make the answers again") from error


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Writes meta.json whole or not at all."""
    temporary = folder / f"{META}.tmp"
    temporary.write_text(json.dumps(meta, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, folder / META)


def _array(path: Path, name: str) -> np.ndarray:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            array = arrays[name]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidConfig(f"{path} is damaged ({error}); remove it, and it will be made again") from error
    if array.dtype != _FIELDS[name]:
        raise InvalidConfig(f"{path} is damaged ({name} is {array.dtype}); remove it, and it will be made again")
    return array


def _joined(arrays: Sequence[np.ndarray], row_shape: tuple[int, ...]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros((0, *row_shape))
