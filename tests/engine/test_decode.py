"""The round loop on table models: greedy equality, limits, lost caches, failing drafters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdiff_dist.config import ConfidenceThreshold, DecodeConfig, Linear, Off, Static
from specdiff_dist.core.rows import SparseRows
from specdiff_dist.engine import decode
from specdiff_dist.errors import DrafterUnavailable, InvalidRequest, InvalidRows, PrefixMismatch, VerifierUnavailable
from specdiff_dist.types import CallCost, DraftBlock, DraftCall, TargetRows, TokenChunk, VerifyCall
from tests.chunks import tokens_of
from tests.doubles import (
    Direct,
    ScriptedDrafter,
    TableVerifier,
    greedy_script,
    make_request,
    plain_greedy,
    random_table,
)  # fmt: skip

VOCAB = 24
TABLE = random_table(VOCAB, order=4)


async def collect(stream: Any) -> list[TokenChunk]:
    return [chunk async for chunk in stream]


def half_right_script(prefix: tuple[int, ...], num_tokens: int) -> list[int]:
    """The target's greedy continuation with errors that depend on the position: rejections at every block offset."""
    tokens = greedy_script(TABLE)(prefix, num_tokens)
    return [(token + 1) % VOCAB if (len(prefix) + i) * 2654435761 % 7 < 2 else token for i, token in enumerate(tokens)]


@pytest.mark.parametrize("length", range(1, 9))
async def test_greedy_output_is_the_plain_output(length: int) -> None:
    """K01 row 1: token ids equal the no-drafter run, for every speculative length."""
    for number in range(25):
        prompt = [(number * 7 + i * 3) % VOCAB for i in range(1 + number % 5)]
        verifier, drafter = TableVerifier(TABLE, VOCAB), ScriptedDrafter(half_right_script, VOCAB)
        request = make_request(prompt, max_tokens=48)
        chunks = await collect(
            decode(request, DecodeConfig(policy=Static(length)), Direct(drafter), Direct(verifier), tier="exact")
        )
        assert tokens_of(chunks) == plain_greedy(TABLE, prompt, 48)
        receipt = chunks[-1].receipt
        assert receipt is not None and receipt.exact and receipt.total_tv == 0.0
        assert 0 < receipt.num_accepted_tokens < receipt.num_draft_tokens  # both outcomes happened
        assert sum(receipt.acceptance_histogram) == receipt.num_rounds == len(chunks)


async def test_drafter_equal_to_target_is_always_accepted_and_positions_are_consecutive() -> None:
    """K01 row 3, K14 row 71: 100 % acceptance; every verify call continues exactly where the cache ends."""
    verifier, drafter = TableVerifier(TABLE, VOCAB), ScriptedDrafter(greedy_script(TABLE), VOCAB)
    request = make_request([5, 3, 9], max_tokens=61)
    chunks = await collect(decode(request, DecodeConfig(policy=Static(5)), Direct(drafter), Direct(verifier), tier="t"))
    receipt = chunks[-1].receipt
    assert receipt is not None and receipt.draft_acceptance_rate == 1.0
    emitted = 0
    for chunk, verify, draft in zip(chunks, verifier.calls, drafter.calls, strict=False):
        committed = 3 + emitted
        for prefix in (verify.prefix, draft.prefix):
            assert prefix.num_committed == committed
        # the verifier lacks the anchor alone, the drafter caches all but the anchor
        assert emitted == 0 or len(verify.prefix.new_token_ids) == 1
        assert emitted == 0 or draft.prefix.prefix_len <= committed - 1
        emitted += len(chunk.token_ids)


async def test_drafter_cache_follows_the_committed_tokens() -> None:
    """K14 row 71: after every round the drafter caches the committed tokens but the anchor, no more, no less."""
    verifier, drafter = TableVerifier(TABLE, VOCAB), ScriptedDrafter(half_right_script, VOCAB)
    request = make_request([5, 3, 9], max_tokens=200)
    emitted = 0
    stream = decode(request, DecodeConfig(policy=Static(4)), Direct(drafter), Direct(verifier), tier="t")
    async for chunk in stream:
        if drafter.num_sessions and chunk.finish_reason is None:
            assert drafter.cached_len("request") == 3 + emitted - 1
            # the verifier's cache holds the block too; its valid part is stated by the next call
            assert verifier.cached_len("request") >= 3 + emitted + len(chunk.token_ids) - 1
        emitted += len(chunk.token_ids)
    assert (verifier.num_sessions, drafter.num_sessions) == (0, 0)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
async def test_max_tokens_is_exact_and_bounds_the_draft(max_tokens: int) -> None:
    """K04 row 31: a perfect drafter does not overshoot and is asked for at most max_tokens - 1 - emitted."""
    verifier, drafter = TableVerifier(TABLE, VOCAB), ScriptedDrafter(greedy_script(TABLE), VOCAB)
    request = make_request([5], max_tokens=max_tokens)
    chunks = await collect(decode(request, DecodeConfig(policy=Static(8)), Direct(drafter), Direct(verifier), tier="t"))
    assert tokens_of(chunks) == plain_greedy(TABLE, [5], max_tokens)
    assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    emitted = 0
    for chunk in chunks:
        asked = [call for call in drafter.calls if call.prefix.num_committed == 1 + emitted]
        assert all(call.num_draft_tokens <= max_tokens - 1 - emitted for call in asked)
        emitted += len(chunk.token_ids)


async def test_draft_shrinks_towards_the_context_limit() -> None:
    """K13 row 67: context 64, prompt 60, 4 tokens left: no error, draft lengths fall to nothing."""
    verifier = TableVerifier(TABLE, VOCAB, max_model_len=64)
    drafter = ScriptedDrafter(lambda prefix, n: [0] * n, VOCAB)
    prompt = [i % VOCAB for i in range(60)]
    request = make_request(prompt, max_tokens=4)
    chunks = await collect(decode(request, DecodeConfig(policy=Static(8)), Direct(drafter), Direct(verifier), tier="t"))
    assert tokens_of(chunks) == plain_greedy(TABLE, prompt, 4) and chunks[-1].finish_reason == "length"
    lengths = [call.num_draft_tokens for call in drafter.calls]
    assert lengths[0] == 3 and lengths == sorted(lengths, reverse=True)
    with pytest.raises(InvalidRequest, match="maximum context length is 64"):
        await collect(decode(make_request(prompt, max_tokens=5), DecodeConfig(), None, Direct(verifier), tier="t"))
    assert verifier.num_sessions == 0


async def test_drafter_with_a_shorter_context_stops_drafting_not_the_answer() -> None:
    verifier = TableVerifier(TABLE, VOCAB)
    drafter = ScriptedDrafter(greedy_script(TABLE), VOCAB, max_model_len=12)
    request = make_request([5] * 4, max_tokens=20)
    chunks = await collect(decode(request, DecodeConfig(policy=Static(4)), Direct(drafter), Direct(verifier), tier="t"))
    assert tokens_of(chunks) == plain_greedy(TABLE, [5] * 4, 20)
    receipt = chunks[-1].receipt
    assert receipt is not None and not receipt.degraded and 0 < receipt.num_draft_tokens <= 8


async def test_off_never_asks_the_drafter() -> None:
    verifier, drafter = TableVerifier(TABLE, VOCAB), ScriptedDrafter(greedy_script(TABLE), VOCAB)
    request = make_request([5], max_tokens=9)
    chunks = await collect(decode(request, DecodeConfig(policy=Off()), Direct(drafter), Direct(verifier), tier="t"))
    assert tokens_of(chunks) == plain_greedy(TABLE, [5], 9) and drafter.calls == []


class FlakyDrafter(Direct):
    """Fails or misbehaves at chosen calls."""

    def __init__(self, engine: Any, faults: dict[int, Any]) -> None:
        super().__init__(engine)
        self.faults, self.number = faults, 0

    async def draft(self, call: DraftCall) -> DraftBlock:
        fault = self.faults.get(self.number)
        self.number += 1
        block = await super().draft(call)
        if isinstance(fault, Exception):
            raise fault
        return fault(block) if fault else block


def _broken_proposal(block: DraftBlock) -> DraftBlock:
    return DraftBlock(block.token_ids, SparseRows.from_rows([]), block.confidences, block.max_probs, block.cached_len)


def _wrong_proposal(block: DraftBlock) -> DraftBlock:
    rows = SparseRows.one_hot((block.token_ids + 1) % VOCAB)
    return DraftBlock(block.token_ids, rows, block.confidences, block.max_probs, block.cached_len)


def _nan_proposal(block: DraftBlock) -> DraftBlock:
    nan = np.full(block.num_tokens, np.nan, np.float32)
    rows = SparseRows(block.proposals.row_splits, block.token_ids, nan)
    return DraftBlock(block.token_ids, rows, block.confidences, block.max_probs, block.cached_len)


def _outside_vocabulary(block: DraftBlock) -> DraftBlock:
    ids = block.token_ids + VOCAB
    return DraftBlock(ids, SparseRows.one_hot(ids), block.confidences, block.max_probs, block.cached_len)


@pytest.mark.parametrize(
    "fault",
    [DrafterUnavailable("gone"), _broken_proposal, _wrong_proposal, _nan_proposal, _outside_vocabulary],
)
async def test_a_failing_drafter_costs_rounds_and_never_tokens(fault: Any) -> None:
    """K02 row 15, K20 row 98: an explicit, counted fallback; the text stays the target's."""
    verifier = TableVerifier(TABLE, VOCAB)
    drafter = FlakyDrafter(ScriptedDrafter(greedy_script(TABLE), VOCAB), {2: fault, 3: fault})
    request = make_request([5, 3], max_tokens=30)
    chunks = await collect(decode(request, DecodeConfig(policy=Static(4)), drafter, Direct(verifier), tier="t"))
    assert tokens_of(chunks) == plain_greedy(TABLE, [5, 3], 30)
    receipt = chunks[-1].receipt
    assert receipt is not None and receipt.degraded
    assert [chunk.rounds[0].degraded for chunk in chunks[:5]] == [False, False, True, True, False]


async def test_longer_and_shorter_replies_than_asked() -> None:
    """K31 row 174: what comes back is handled, whatever its length."""
    for extra in (-3, -1, 0, 2):
        drafter = ScriptedDrafter(lambda prefix, n, extra=extra: greedy_script(TABLE)(prefix, n + extra), VOCAB)
        verifier = TableVerifier(TABLE, VOCAB)
        request = make_request([5, 3], max_tokens=30)
        config = DecodeConfig(policy=Static(4))
        chunks = await collect(decode(request, config, Direct(drafter), Direct(verifier), tier="t"))
        assert tokens_of(chunks) == plain_greedy(TABLE, [5, 3], 30)
        assert max(len(call.draft_token_ids) for call in verifier.calls) == min(4, 4 + extra)


class ForgetfulVerifier(Direct):
    """Loses the session before chosen calls, as a replaced replica does."""

    def __init__(self, engine: Any, lost_before: set[int]) -> None:
        super().__init__(engine)
        self.lost_before, self.number = lost_before, 0

    async def verify(self, call: VerifyCall) -> TargetRows:
        if self.number in self.lost_before:
            self._engine.release(call.prefix.session_id)
        self.number += 1
        return await super().verify(call)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_lost_verifier_cache_is_rebuilt_from_committed_tokens(temperature: float) -> None:
    async def run(lost: set[int]) -> tuple[list[int], int]:
        verifier = ForgetfulVerifier(TableVerifier(TABLE, VOCAB), lost)
        drafter = ScriptedDrafter(half_right_script, VOCAB)
        request = make_request([5, 3], max_tokens=40, temperature=temperature, seed=3)
        chunks = await collect(decode(request, DecodeConfig(policy=Static(3)), Direct(drafter), verifier, tier="t"))
        assert chunks[-1].receipt is not None
        return tokens_of(chunks), chunks[-1].receipt.verifier_rebuilds

    undisturbed, rebuilds = await run(set())
    assert rebuilds == 0
    disturbed, rebuilds = await run({2, 4, 9})
    assert disturbed == undisturbed and rebuilds == 3


async def test_a_verifier_that_never_remembers_is_an_error_not_a_loop() -> None:
    class Amnesiac(Direct):
        async def verify(self, call: VerifyCall) -> TargetRows:
            raise PrefixMismatch(0)

    with pytest.raises(VerifierUnavailable):
        await collect(decode(make_request(), DecodeConfig(), None, Amnesiac(TableVerifier(TABLE, VOCAB)), tier="t"))


async def test_nan_rows_end_the_request_with_an_error() -> None:
    """K02 row 11: no made-up token."""

    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        return TABLE(prefix) if len(prefix) < 6 else np.full(VOCAB, np.nan, np.float32)

    verifier = TableVerifier(logits, VOCAB)
    got: list[int] = []
    with pytest.raises(InvalidRows):
        async for chunk in decode(make_request([1], max_tokens=20), DecodeConfig(), None, Direct(verifier), tier="t"):
            got += chunk.token_ids
    assert got == plain_greedy(TABLE, [1], 5) and verifier.num_sessions == 0


@pytest.mark.parametrize("wide", [False, True])
async def test_same_seed_same_tokens_and_wide_equals_narrow(wide: bool) -> None:
    async def run(seed: int, wide: bool) -> list[int]:
        verifier = TableVerifier(TABLE, VOCAB, wide=wide)
        request = make_request([5, 3], max_tokens=40, temperature=1.2, seed=seed)
        drafter = ScriptedDrafter(half_right_script, VOCAB)
        return tokens_of(
            await collect(
                decode(request, DecodeConfig(policy=Static(3)), Direct(drafter), Direct(verifier), tier="exact")
            )
        )

    assert await run(7, wide) == await run(7, False)
    assert await run(8, wide) != await run(7, wide)


async def test_lossy_rule_reports_its_deviation() -> None:
    """A one-hot proposal y and λ: TV = λ(1 - p(y)) at every reached draft position."""
    verifier = TableVerifier(TABLE, VOCAB)
    drafter = ScriptedDrafter(lambda prefix, n: [2] * n, VOCAB)
    config = DecodeConfig(rule=Linear(0.5), policy=Static(1))
    request = make_request([5], max_tokens=2, temperature=1.0, seed=4)
    chunks = await collect(decode(request, config, Direct(drafter), Direct(verifier), tier="t"))
    logits = TABLE((5,)).astype(np.float64)
    probability = np.exp(logits[2]) / np.exp(logits).sum()
    receipt = chunks[-1].receipt
    assert receipt is not None and not receipt.exact
    assert receipt.max_tv == pytest.approx(0.5 * (1 - probability), rel=1e-6)
    assert receipt.mean_tv == pytest.approx(receipt.total_tv / 2)


async def test_confidence_threshold_cuts_the_block() -> None:
    class Unsure(Direct):
        async def draft(self, call: DraftCall) -> DraftBlock:
            block = await super().draft(call)
            fading = np.linspace(0.9, 0.1, block.num_tokens).astype(np.float32)
            return DraftBlock(block.token_ids, block.proposals, fading, fading, block.cached_len, CallCost())

    verifier = TableVerifier(TABLE, VOCAB)
    drafter = Unsure(ScriptedDrafter(greedy_script(TABLE), VOCAB))
    config = DecodeConfig(policy=ConfidenceThreshold(0.5, 5))
    chunks = await collect(decode(make_request([5], max_tokens=12), config, drafter, Direct(verifier), tier="t"))
    assert tokens_of(chunks) == plain_greedy(TABLE, [5], 12)
    assert len(verifier.calls[0].draft_token_ids) == 3  # .9 .7 .5 | .3 .1


async def test_closing_the_stream_early_releases_both_sessions() -> None:
    verifier, drafter = TableVerifier(TABLE, VOCAB), ScriptedDrafter(greedy_script(TABLE), VOCAB)
    request = make_request([5], max_tokens=100)
    stream = decode(request, DecodeConfig(policy=Static(2)), Direct(drafter), Direct(verifier), tier="t")
    await stream.__anext__()
    assert (verifier.num_sessions, drafter.num_sessions) == (1, 1)
    await stream.aclose()  # type: ignore[attr-defined]
    assert (verifier.num_sessions, drafter.num_sessions) == (0, 0)
