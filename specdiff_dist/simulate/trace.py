"""Traces: what rounds looked like to the decisions, for replay. Numbers only: no token, no text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgpack
import numpy as np

from specdiff_dist.core.rows import FloatArray
from specdiff_dist.core.speculation import DraftStatistics
from specdiff_dist.errors import InvalidConfig

VERSION = 1
_ARRAYS = (
    "token_probs",
    "max_probs",
    "sum_squares",
    "target_at_token",
    "draft_at_token",
    "distance",
    "accept_uniforms",
)
_SCALARS = ("num_accepted", "draft_s", "verify_s", "wall_s", "num_drafted")


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
    draft_s: float
    verify_s: float
    wall_s: float

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


def write_trace(path: Path, requests: Iterable[Iterable[RoundTrace]], about: dict[str, object]) -> None:
    """One msgpack map per line of a stream: the header, then a request each. float32 on disk."""
    with path.open("wb") as file:
        packer = msgpack.Packer()
        file.write(packer.pack({"version": VERSION, **about}))
        for rounds in requests:
            file.write(packer.pack([_packed(one) for one in rounds]))


def read_trace(path: Path) -> tuple[dict[str, object], list[list[RoundTrace]]]:
    """`(about, requests)`. Raises InvalidConfig for a file that is no trace of this version."""
    try:
        with path.open("rb") as file:
            stream: Iterator[object] = iter(msgpack.Unpacker(file))
            about = next(stream)
            if not isinstance(about, dict) or about.get("version") != VERSION:
                raise InvalidConfig(f"{path} is no trace of version {VERSION}; record it again")
            return about, [[_unpacked(one) for one in rounds] for rounds in stream]  # type: ignore[union-attr]
    except (OSError, StopIteration, ValueError, TypeError, KeyError) as error:
        raise InvalidConfig(f"cannot read the trace {path}: {error!r}") from error


def _packed(one: RoundTrace) -> dict[str, object]:
    arrays = {name: np.asarray(getattr(one, name), "<f4").tobytes() for name in _ARRAYS}
    return {**arrays, **{name: getattr(one, name) for name in _SCALARS}}


def _unpacked(plain: dict[str, object]) -> RoundTrace:
    arrays = {name: np.frombuffer(plain[name], "<f4").astype(np.float64) for name in _ARRAYS}  # type: ignore[arg-type]
    if len({len(array) for array in arrays.values()}) != 1:
        raise ValueError("arrays of different lengths")
    return RoundTrace(**arrays, **{name: plain[name] for name in _SCALARS})  # type: ignore[arg-type]
