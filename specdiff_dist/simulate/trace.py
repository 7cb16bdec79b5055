"""Traces: what rounds looked like to the decisions, for replay. Numbers only: no token, no text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgpack
import numpy as np

from specdiff_dist.core.rows import FloatArray
from specdiff_dist.core.speculation import DraftStatistics
from specdiff_dist.errors import InvalidConfig

VERSION = 1
_PROBABILITIES = ("token_probs", "max_probs", "sum_squares", "target_at_token", "draft_at_token", "distance")
_ARRAYS = (*_PROBABILITIES, "accept_uniforms")
_COUNTS = ("num_accepted", "num_drafted", "num_draft_calls")
_SECONDS = ("draft_s", "verify_s", "wall_s")
_ROUNDING = 1e-5  # float32 probabilities may pass 1 by that much


@dataclass(frozen=True, slots=True, eq=False)
class RoundTrace:
    """One round. Arrays are float64 over the d verified draft positions; seconds are the caller's wall clock.

    Positions behind a rejection are there too: the verifier judged them given the draft, so a replay knows what would
    have happened to any shorter or equal length under any rule.
    """

    token_probs: FloatArray  # q(y) as reported for the policy (temperature 1 for greedy drafts)
    max_probs: FloatArray
    sum_squares: FloatArray
    target_at_token: FloatArray  # p(y)
    draft_at_token: FloatArray  # q(y) of the proposal
    distance: FloatArray  # TV(p, q)
    accept_uniforms: FloatArray
    num_accepted: int
    num_drafted: int
    num_draft_calls: int
    draft_s: float  # all draft calls
    verify_s: float
    wall_s: float  # the whole round

    @property
    def length(self) -> int:
        return len(self.token_probs)

    def statistics(self, length: int) -> DraftStatistics:
        """What a policy would see of the first `length` tokens."""
        return DraftStatistics(self.token_probs[:length], self.max_probs[:length], self.sum_squares[:length])

    def acceptance(self, leniency: float = 0.0) -> FloatArray:
        """Probability that the drafted token is accepted, given that it is reached, under the linear rule. [d]."""
        return np.minimum((1.0 - leniency) * self.target_at_token / self.draft_at_token + leniency, 1.0)

    def is_accepted(self, leniency: float = 0.0) -> np.ndarray:
        """Whether each token would be accepted by the round's own numbers, given that it is reached. bool [d]."""
        return self.accept_uniforms < self.acceptance(leniency)


class TraceWriter:
    """A trace file that grows by one request at a time: a msgpack map as header, then a list of rounds per request.

    float32 on disk. What is written is complete after every request, whatever happens to the process.
    """

    def __init__(self, path: Path, about: dict[str, object]) -> None:
        """Starts the file anew. `about` is for people: which models, which settings. Raises InvalidConfig."""
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise InvalidConfig(f"cannot write the trace {path}: {error.strerror}") from error
        self._packer = msgpack.Packer()
        self._write({"version": VERSION, **about})

    def write(self, rounds: Iterable[RoundTrace]) -> None:
        """Appends one request."""
        self._write([_packed(one) for one in rounds])

    def close(self) -> None:
        self._file.close()

    def _write(self, item: object) -> None:
        self._file.write(self._packer.pack(item))
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def write_trace(path: Path, requests: Iterable[Iterable[RoundTrace]], about: dict[str, object]) -> None:
    """A whole trace at once."""
    with TraceWriter(path, about) as writer:
        for rounds in requests:
            writer.write(rounds)


def read_trace(path: Path) -> tuple[dict[str, object], list[list[RoundTrace]]]:
    """`(about, requests)`. Raises InvalidConfig for a file that is no trace of this version, or is cut off."""
    try:
        with path.open("rb") as file:
            stream = msgpack.Unpacker(file)
            about = next(stream, None)
            if not isinstance(about, dict) or about.get("version") != VERSION:
                raise InvalidConfig(f"{path} is no trace of version {VERSION}; record it again")
            requests = [_request(item) for item in stream]
            if stream.tell() != path.stat().st_size:
                raise ValueError("it ends within a request")
            return about, requests
    except (OSError, ValueError, TypeError, KeyError, msgpack.exceptions.UnpackException) as error:
        raise InvalidConfig(f"cannot read the trace {path}: {error}") from error


def drafted_rounds(requests: Sequence[Sequence[RoundTrace]]) -> list[RoundTrace]:
    """All rounds with a draft, without each request's first, whose calls carry the prompt."""
    return [one for rounds in requests for one in rounds[1:] if one.length]


def _packed(one: RoundTrace) -> dict[str, object]:
    arrays = {name: np.asarray(getattr(one, name), "<f4").tobytes() for name in _ARRAYS}
    return {**arrays, **{name: getattr(one, name) for name in (*_COUNTS, *_SECONDS)}}


def _request(item: object) -> list[RoundTrace]:
    if not isinstance(item, list):
        raise ValueError("a request is not a list of rounds")
    return [_unpacked(plain) for plain in item]


def _unpacked(plain: Any) -> RoundTrace:
    """Checks everything that replay relies on: a trace may come from anywhere."""
    if not isinstance(plain, dict) or plain.keys() != {*_ARRAYS, *_COUNTS, *_SECONDS}:
        raise ValueError("a round has other fields than it should")
    arrays = {name: np.frombuffer(plain[name], "<f4").astype(np.float64) for name in _ARRAYS}
    if len({len(array) for array in arrays.values()}) != 1:
        raise ValueError("arrays of different lengths")
    for name, array in arrays.items():
        if not np.all((array >= 0.0) & (array <= 1.0 + _ROUNDING)):  # false for NaN
            raise ValueError(f"{name} must be in [0, 1]")
    if np.any(arrays["draft_at_token"] == 0.0):
        raise ValueError("a draft token has probability 0 in its own proposal")
    if not all(type(plain[name]) is int and plain[name] >= 0 for name in _COUNTS):
        raise ValueError("counts must be integers, 0 or more")
    if not plain["num_accepted"] <= len(arrays["distance"]) <= plain["num_drafted"]:
        raise ValueError("more tokens accepted than verified, or verified than drafted")
    if not all(type(plain[name]) is float and 0.0 <= plain[name] < 1e9 for name in _SECONDS):
        raise ValueError("seconds must be numbers, 0 or more")
    scalars = {name: plain[name] for name in (*_COUNTS, *_SECONDS)}
    return RoundTrace(**arrays, **scalars)
