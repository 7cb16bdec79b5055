"""What sharing a forward is worth: verify calls of several sessions at once against one after another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from specdiff_dist.transport.local import LocalVerifier
from specdiff_dist.types import PrefixStatement, SamplingParams, VerifyCall, prefix_crc
from specdiff_dist.verifiers.causal_lm import CausalLMVerifier
from specdiff_dist.verifiers.forward import ForwardPart, ModelForward, forward_one

SAMPLING = SamplingParams(0.7, top_k=50, top_p=0.95)
SESSIONS = (1, 2, 4, 8, 16)
TOKENS = (1, 2, 4, 8, 16)  # forwarded per session: the anchor and the drafts
FIRST_ID = 32  # ids below are often special


@dataclass(frozen=True, slots=True)
class EngineCell:
    """`num_sessions` verify calls of `num_tokens` tokens each; medians in milliseconds."""

    num_sessions: int
    num_tokens: int
    together_ms: float
    apart_ms: float

    @property
    def speedup(self) -> float:
        return self.apart_ms / self.together_ms


@dataclass(frozen=True, slots=True)
class CostFit:
    """Milliseconds of a shared forward = base + per_token · all tokens + per_session · sessions, least squares on relative
    errors."""

    base_ms: float
    per_token_ms: float
    per_session_ms: float
    median_relative_error: float
    largest_relative_error: float

    def __call__(self, num_sessions: int, num_tokens: int) -> float:
        return self.base_ms + self.per_token_ms * num_sessions * num_tokens + self.per_session_ms * num_sessions


@dataclass(frozen=True, slots=True)
class Agreement:
    """The same 8 × 8 tokens in one forward and in eight."""

    max_logit_difference: float
    same_greedy_tokens: bool


@dataclass(frozen=True, slots=True)
class Sessions:
    """Cached prefixes of one length, with what comes after them."""

    token_ids: np.ndarray  # int32 [sessions, num_cached + most tokens]
    num_cached: int

    def call(self, session: int, num_tokens: int, round_index: int) -> VerifyCall:
        """Verifies `num_tokens - 1` drafts after the anchor; the first call of a session reads its prefix."""
        row, cached = self.token_ids[session], self.num_cached if round_index else 0
        prefix = PrefixStatement(
            f"session-{session}", round_index, cached, prefix_crc(row[:cached]), row[cached : self.num_cached + 1]
        )
        drafts = row[self.num_cached + 1 : self.num_cached + num_tokens]
        return VerifyCall(prefix, drafts, SAMPLING, None, np.full(num_tokens, 0.5))


def make_sessions(vocab_size: int, *, num_cached: int, seed: int = 0) -> Sessions:
    """Random tokens: what is cached costs the same whatever it says."""
    rng = np.random.default_rng(seed)
    shape = (max(SESSIONS), num_cached + max(TOKENS))
    return Sessions(rng.integers(FIRST_ID, vocab_size, shape).astype(np.int32), num_cached)


def measure_cells(
    model: ModelForward[Any],
    sessions: Sessions,
    *,
    num_repeats: int,
    grid: Sequence[tuple[int, int]],
    on_cell: Callable[[EngineCell], None] = lambda cell: None,
) -> list[EngineCell]:
    """A cell for each (sessions, tokens) of `grid`, together and apart in turns."""
    return asyncio.run(_measure(model, sessions, num_repeats, grid, on_cell))


async def _measure(
    model: ModelForward[Any],
    sessions: Sessions,
    num_repeats: int,
    grid: Sequence[tuple[int, int]],
    on_cell: Callable[[EngineCell], None],
) -> list[EngineCell]:
    verifier = LocalVerifier(CausalLMVerifier(model, name="measured"))
    for session in range(max(num for num, _ in grid)):
        await verifier.verify(sessions.call(session, 1, 0))
    cells, round_index = [], 0
    for num_sessions, num_tokens in grid:
        together, apart = [], []
        for _ in range(num_repeats + 1):
            round_index += 1
            calls = [sessions.call(session, num_tokens, round_index) for session in range(num_sessions)]
            started = perf_counter()
            await asyncio.gather(*(verifier.verify(call) for call in calls))
            between = perf_counter()
            for call in calls:
                await verifier.verify(call)
            together.append(between - started)
            apart.append(perf_counter() - between)
        cells.append(EngineCell(num_sessions, num_tokens, 1e3 * median(together[1:]), 1e3 * median(apart[1:])))
        on_cell(cells[-1])
    await verifier.close()
    return cells


def fit_cost(cells: Sequence[EngineCell]) -> CostFit:
    """From the shared forwards of `cells`."""
    took = np.array([cell.together_ms for cell in cells])
    rows = np.array([[1.0, cell.num_sessions * cell.num_tokens, cell.num_sessions] for cell in cells])
    (base, per_token, per_session), *_ = np.linalg.lstsq(rows / took[:, None], np.ones(len(cells)), rcond=None)
    errors = np.abs(rows @ [base, per_token, per_session] - took) / took
    return CostFit(float(base), float(per_token), float(per_session), float(np.median(errors)), float(errors.max()))


def compare_logits(model: ModelForward[Any], sessions: Sessions, *, count: int = 8, num_tokens: int = 8) -> Agreement:
    """`count` sessions with `num_tokens` tokens each, in one forward and one by one."""
    caches = []
    for session in range(count):
        caches.append(model.new_cache())
        forward_one(model, caches[-1], sessions.token_ids[session, : sessions.num_cached], 1)
    new = sessions.token_ids[:count, sessions.num_cached : sessions.num_cached + num_tokens]
    apart = []
    for cache, tokens in zip(caches, new, strict=True):
        apart.append(forward_one(model, cache, tokens, num_tokens)[0])
        model.crop(cache, sessions.num_cached)
    parts = [ForwardPart(cache, tokens, num_tokens) for cache, tokens in zip(caches, new, strict=True)]
    together = [done.logits for done in model.forward_parts(parts)]
    differences = [float((a - b).abs().max()) for a, b in zip(apart, together, strict=True)]
    same = all(bool((a.argmax(-1) == b.argmax(-1)).all()) for a, b in zip(apart, together, strict=True))
    return Agreement(max(differences), same)
