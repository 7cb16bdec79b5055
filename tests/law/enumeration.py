"""Exact enumeration of the system's output law.

Everything random goes through two functions, `core.sampling.draw_index` and `count_accepted`. Here they are replaced by
ones that walk all outcomes with their probabilities, and the *real* round loop, drafter loop and acceptance code run
once per path. Independence is part of the claim: a path in which one uniform decides two things fails.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from specdiff_dist.config import DecodeConfig
from specdiff_dist.core import sampling
from specdiff_dist.core.speculation import Knowledge
from specdiff_dist.drafters.combined import CombinedDrafter
from specdiff_dist.engine import decode
from specdiff_dist.roles import DrafterEngine, VerifierEngine
from specdiff_dist.types import GenerateRequest, TokenChunk
from tests.doubles import Direct

Law = dict[tuple[int, ...], float]


class Tape:
    """Depth-first walk over all sequences of choices; `weight` is the probability of the current path."""

    def __init__(self) -> None:
        self._script: list[tuple[int, list[int]]] = []  # (next index into options, options)
        self._depth = 0
        self._seen: set[float] = set()
        self.weight = 1.0

    def start(self) -> None:
        self._depth, self.weight, self._seen = 0, 1.0, set()

    def choose(self, probs: list[float], uniform: float) -> int:
        assert uniform not in self._seen, "one uniform decides two things"
        self._seen.add(uniform)
        if self._depth == len(self._script):
            self._script.append((0, [i for i, p in enumerate(probs) if p > 0.0]))
        at, options = self._script[self._depth]
        self._depth += 1
        self.weight *= probs[options[at]]
        return options[at]

    def advance(self) -> bool:
        """Moves to the next path; False when all have been walked."""
        del self._script[self._depth :]
        while self._script:
            at, options = self._script.pop()
            if at + 1 < len(options):
                self._script.append((at + 1, options))
                return True
        return False

    def draw_index(self, weights: np.ndarray, uniform: float) -> int:
        return self.choose((weights / weights.sum()).tolist(), uniform)

    def count_accepted(self, ratios: np.ndarray, uniforms: np.ndarray) -> int:
        for i, ratio in enumerate(ratios.tolist()):
            accepted = min(1.0, ratio)
            if self.choose([1.0 - accepted, accepted], float(uniforms[i])) == 0:
                return i
        return len(ratios)


def run_now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("the coroutine suspended")


def chunks(
    request: GenerateRequest,
    config: DecodeConfig,
    drafter: DrafterEngine | CombinedDrafter,
    verifier: VerifierEngine,
    *,
    first: bool,
    knowledge: Knowledge | None = None,
) -> list[TokenChunk]:
    """All chunks of one decode, or the first alone."""
    shared = copy.deepcopy(knowledge)  # learning must not leak from one path into the next
    role = drafter if isinstance(drafter, CombinedDrafter) else Direct(drafter)
    stream: AsyncIterator[TokenChunk] = decode(
        request, config, role, Direct(verifier), tier="test", knowledge=shared
    )  # fmt: skip
    got: list[TokenChunk] = []
    while True:
        try:
            got.append(run_now(stream.__anext__()))  # type: ignore[arg-type]
        except StopAsyncIteration:
            return got
        if first:
            run_now(stream.aclose())  # type: ignore[attr-defined]
            return got


def enumerate_paths(monkeypatch: pytest.MonkeyPatch, run: Callable[[], tuple[int, ...]]) -> Law:
    """Law of `run()`'s result over all random choices."""
    tape = Tape()
    law: Law = defaultdict(float)
    with monkeypatch.context() as patch:
        patch.setattr(sampling, "draw_index", tape.draw_index)
        patch.setattr(sampling, "count_accepted", tape.count_accepted)
        while True:
            tape.start()
            outcome = run()
            law[outcome] += tape.weight
            if not tape.advance():
                return dict(law)


def total_variation(first: Law, second: Law) -> float:
    return 0.5 * sum(abs(first.get(key, 0.0) - second.get(key, 0.0)) for key in {*first, *second})


def chained(one_round: Callable[[tuple[int, ...]], Law], prompt: tuple[int, ...], length: int) -> Law:
    """Joint law of the first `length` tokens from the law of one round per prefix (rounds share no random numbers:
    `test_rounds_are_independent` walks whole decodes)."""
    law: Law = defaultdict(float)
    pending: Law = {(): 1.0}
    while pending:
        done, weight = pending.popitem()
        for tokens, prob in one_round(prompt + done).items():
            longer = (done + tokens)[:length]
            if len(longer) == length:
                law[longer] += weight * prob
            else:
                pending[longer] = pending.get(longer, 0.0) + weight * prob
    return dict(law)
