"""Drafting ahead: it changes when drafts are there, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from specdiff_dist.config import ConfidenceThreshold, DecodeConfig, Effort, Linear, Static
from specdiff_dist.core.speculation import Additive, FailFast, LibraSpec, MeasuredLibraSpec, Policy
from specdiff_dist.drafters.combined import CombinedDrafter
from specdiff_dist.engine import decode
from specdiff_dist.engine.ahead import DraftAhead
from specdiff_dist.errors import DrafterUnavailable, InvalidRequest, PrefixMismatch
from specdiff_dist.types import DraftBlock, DraftCall, TargetRows, TokenChunk, VerifyCall
from tests.chunks import tokens_of
from tests.doubles import (
    Direct,
    FeatureDrafter,
    ScriptedDrafter,
    TableDrafter,
    TableVerifier,
    greedy_script,
    make_request,
    plain_greedy,
    random_table,
)  # fmt: skip
from tests.law.enumeration import chunks as chunks_of
from tests.law.enumeration import enumerate_paths, total_variation
from tests.law.test_exact_law import SAMPLED, target_law

VOCAB = 12
TABLE = random_table(VOCAB, order=3)
PROMPT = (3, 1, 4)


@dataclass
class Busy:
    """Who was called when, in ticks of the event loop's clock."""

    draft: list[tuple[float, float]] = field(default_factory=list)
    verify: list[tuple[float, float]] = field(default_factory=list)

    def overlap_s(self) -> float:
        return sum(
            max(min(a[1], b[1]) - max(a[0], b[0]), 0.0) for a in self.draft for b in self.verify
        )  # fmt: skip


class Slow(Direct):
    """A role whose calls take their time, like a replica's."""

    def __init__(self, engine: Any, seconds: float = 0.0, busy: list[tuple[float, float]] | None = None) -> None:
        super().__init__(engine)
        self._seconds, self._busy, self.num_released = seconds, [] if busy is None else busy, 0

    async def _timed(self, answer: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        started = asyncio.get_running_loop().time()
        await asyncio.sleep(self._seconds)
        reply = await answer(call)
        self._busy.append((started, asyncio.get_running_loop().time()))
        return reply

    async def draft(self, call: DraftCall) -> DraftBlock:
        return await self._timed(super().draft, call)

    async def verify(self, call: VerifyCall) -> TargetRows:
        return await self._timed(super().verify, call)

    async def release(self, session_id: str) -> None:
        self.num_released += 1
        await super().release(session_id)


async def answer(drafter: Any, config: DecodeConfig, *, verifier: Any = None, **options: Any) -> list[TokenChunk]:
    request = make_request(PROMPT, **{"max_tokens": 40, **options})
    judge = verifier or Slow(TableVerifier(TABLE, VOCAB))
    return [chunk async for chunk in decode(request, config, drafter, judge, tier="exact")]


def outcomes(chunks: list[TokenChunk]) -> list[bool | None]:
    return [record.drafted_ahead for chunk in chunks for record in chunk.rounds]


def mostly_right(prefix: tuple[int, ...], num_tokens: int) -> list[int]:
    """The target's own continuation, wrong at every eleventh position of the text."""
    tokens = greedy_script(TABLE)(prefix, num_tokens)
    return [(token + 1) % VOCAB if (len(prefix) + at) % 11 == 0 else token for at, token in enumerate(tokens)]


POLICIES: list[Policy] = [
    Static(1), Static(3), ConfidenceThreshold(0.5, 4), Additive(2, 6), FailFast(0.4, 2, 6, "max_prob"),
    LibraSpec(2.0, 3, 3, "max_prob"), MeasuredLibraSpec(2, 6),
]  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("effort", [Effort(1), Effort(2)], ids=["one step", "two steps"])
async def test_the_answer_is_the_same_token_for_token(monkeypatch, policy: Policy, temperature: float, effort: Effort):
    """Three tokens, so that hopes come true by chance."""
    config = DecodeConfig(policy=policy, effort=effort, draft_ahead=True, rule=Linear(0.5))
    table, hits = random_table(3, order=3), set()

    async def answered(seed: int) -> list[TokenChunk]:
        drafter, judge = Slow(TableDrafter(3)), Slow(TableVerifier(table, 3))
        request = make_request((seed % 3, seed // 3 % 3), max_tokens=40, temperature=temperature, seed=seed)
        return [chunk async for chunk in decode(request, config, drafter, judge, tier="exact")]

    for seed in range(9):
        ahead = await answered(seed)
        with monkeypatch.context() as patch:
            patch.setattr(DraftAhead, "ask", lambda self, block, guess: None)
            later = await answered(seed)
        assert tokens_of(ahead) == tokens_of(later)
        assert [chunk.token_ids for chunk in ahead] == [chunk.token_ids for chunk in later]
        assert set(outcomes(later)) == {None}
        hits |= set(outcomes(ahead))
    assert {True, False} <= hits


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
async def test_greedy_is_the_plain_answer(policy: Policy):
    drafter = ScriptedDrafter(mostly_right, VOCAB)
    chunks = await answer(Slow(drafter), DecodeConfig(policy=policy, draft_ahead=True))
    assert tokens_of(chunks) == plain_greedy(TABLE, PROMPT, 40)
    assert outcomes(chunks).count(True) >= 2 and outcomes(chunks).count(False) >= 2
    assert not any(record.degraded for chunk in chunks for record in chunk.rounds)
    receipt = chunks[-1].receipt
    assert receipt is not None and receipt.exact and not receipt.degraded


@pytest.mark.parametrize("policy", [Static(1), Static(2), FailFast(0.0, 1, 2, "max_prob")], ids=["1", "2", "blocks"])
def test_the_token_that_is_asked_for_as_a_guess_changes_no_law(monkeypatch: pytest.MonkeyPatch, policy: Policy):
    """With what is tested above (taking a draft from ahead changes no token), drafting ahead is exact."""
    table = random_table(2, 9)
    drafter, verifier = TableDrafter(2, 4), TableVerifier(table, 2)
    request = make_request((1, 0, 1), max_tokens=4, temperature=1.0)
    config = DecodeConfig(policy=policy, draft_ahead=True)
    asked = set()
    monkeypatch.setattr(DraftAhead, "ask", lambda self, block, guess: asked.add(guess))

    def run() -> tuple[int, ...]:
        got = chunks_of(request, config, drafter, verifier, first=False)
        return tuple(token for chunk in got for token in chunk.token_ids)

    law = enumerate_paths(monkeypatch, run)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    assert total_variation(law, target_law(table, 4, SAMPLED, (1, 0, 1))) < 1e-12
    assert {0, 1} <= asked


async def test_drafter_and_verifier_work_at_the_same_time():
    seconds = {}
    for is_ahead in (True, False):
        busy = Busy()
        chunks = await answer(
            Slow(ScriptedDrafter(greedy_script(TABLE), VOCAB), 0.02, busy.draft),
            DecodeConfig(policy=Static(3), draft_ahead=is_ahead),
            verifier=Slow(TableVerifier(TABLE, VOCAB), 0.02, busy.verify),
        )
        assert tokens_of(chunks) == plain_greedy(TABLE, PROMPT, 40)
        seconds[is_ahead] = busy.overlap_s()
        assert outcomes(chunks)[1:] == [is_ahead or None] * (len(chunks) - 1)
    assert seconds[True] > 0.1 and seconds[False] < 0.01


class Failing(Slow):
    """Fails every second call; calls that have to wait for their turn hang instead where `hangs`."""

    def __init__(self, engine: Any, error: Exception | None) -> None:
        super().__init__(engine)
        self._error, self._count = error, 0

    async def draft(self, call: DraftCall) -> DraftBlock:
        self._count += 1
        if self._count % 2 == 0:
            if self._error is None:
                await asyncio.sleep(3600)
            else:
                self._engine.release(call.prefix.session_id)
                raise self._error
        return await super().draft(call)


@pytest.mark.parametrize("error", [DrafterUnavailable("away"), PrefixMismatch(0)], ids=["away", "lost"])
async def test_a_drafter_that_fails_ahead_is_asked_again(error: Exception):
    drafter = Failing(ScriptedDrafter(mostly_right, VOCAB), error)
    chunks = await answer(drafter, DecodeConfig(policy=Static(3), draft_ahead=True))
    assert tokens_of(chunks) == plain_greedy(TABLE, PROMPT, 40)
    assert outcomes(chunks).count(False) > 2
    assert_nothing_left(drafter)


@pytest.mark.parametrize("max_tokens", range(1, 12))
async def test_an_answer_that_ends_leaves_no_call_behind(max_tokens: int):
    drafter = Failing(
        ScriptedDrafter(greedy_script(TABLE), VOCAB), None
    )  # hangs at its second call, the first one ahead
    stop = plain_greedy(TABLE, PROMPT, max_tokens)[-1]
    config = DecodeConfig(policy=Static(3), draft_ahead=True)
    request = make_request(PROMPT, max_tokens=max_tokens, stop_token_ids=(stop,))
    judge = Slow(TableVerifier(TABLE, VOCAB))
    stream = decode(request, config, drafter, judge, tier="exact")
    first = await anext(stream)
    await stream.aclose()
    assert first.token_ids and (drafter.num_released, judge.num_released) == (1, 1)
    assert_nothing_left(drafter)


async def test_cancelling_at_any_moment_frees_both():
    for num_ticks in range(1000):
        drafter, judge = Slow(ScriptedDrafter(mostly_right, VOCAB)), Slow(TableVerifier(TABLE, VOCAB))
        task = asyncio.create_task(answer(drafter, DecodeConfig(policy=Static(2), draft_ahead=True), verifier=judge))
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        if task.done():
            break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert drafter._engine.num_sessions == judge._engine.num_sessions == 0
        assert_nothing_left(drafter)
    assert num_ticks > 20


def assert_nothing_left(drafter: Slow) -> None:
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert drafter._engine.num_sessions == 0


async def test_drafters_that_go_by_more_than_the_tokens_are_refused():
    config = DecodeConfig(policy=Static(2), draft_ahead=True)
    judge = Direct(TableVerifier(TABLE, VOCAB, num_layers=6))
    for drafter, why in (
        (Direct(FeatureDrafter(VOCAB)), "verifier's features"),
        (CombinedDrafter(Direct(TableDrafter(VOCAB))), "copying"),
    ):
        with pytest.raises(InvalidRequest, match=f"draft_ahead needs .* {why}") as refused:
            await answer(drafter, config, verifier=judge)
        assert refused.value.param == "quality.draft_ahead"
    plain = await answer(None, config, verifier=judge)
    assert tokens_of(plain) == plain_greedy(TABLE, PROMPT, 40)


async def test_a_round_index_never_falls_and_the_prefix_is_never_believed_beyond_what_is_committed():
    drafter = ScriptedDrafter(mostly_right, VOCAB)
    chunks = await answer(Slow(drafter), DecodeConfig(policy=Static(3), draft_ahead=True))
    text = [*PROMPT, *tokens_of(chunks)]
    rounds = [call.prefix.round_index for call in drafter.calls]
    assert rounds == sorted(rounds)
    assert all(call.prefix.prefix_len <= len(text) for call in drafter.calls)
    stated = [(*text[: call.prefix.prefix_len], *call.prefix.new_token_ids.tolist()) for call in drafter.calls]
    right = [tokens for tokens in stated if list(tokens) == text[: len(tokens)]]
    assert len(right) < len(stated)  # some hopes were vain, and nobody told them again as committed
    assert len(drafter.calls) < 2 * len(chunks)
