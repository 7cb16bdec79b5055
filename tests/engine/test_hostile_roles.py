"""Drafters and verifiers that misbehave in ways no transport check may catch: the loop itself must stand them."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from specdiff_dist.config import DecodeConfig, Static
from specdiff_dist.core.rows import SparseRows
from specdiff_dist.core.rules import Cactus, Lenience, Rule, Typical
from specdiff_dist.core.speculation import (
    ConfidenceThreshold,
    FailFast,
    Knowledge,
    LibraSpec,
    MeasuredLibraSpec,
    Policy,
)
from specdiff_dist.engine import decode
from specdiff_dist.errors import DrafterUnavailable, InvalidConfig, InvalidRequest, PrefixMismatch
from specdiff_dist.types import DraftBlock, DraftCall, TokenChunk
from tests.doubles import (
    Direct,
    ScriptedDrafter,
    TableDrafter,
    TableVerifier,
    greedy_script,
    make_request,
    plain_greedy,
    random_table,
)  # fmt: skip

VOCAB = 24
TABLE = random_table(VOCAB, order=4)
POLICIES: list[Policy] = [
    Static(4), LibraSpec(1.0, 3, 12), LibraSpec(1.0, 3, 12, "max_prob"), MeasuredLibraSpec(3, 9), FailFast(0.5, 2, 8),
    ConfidenceThreshold(0.5, 4, "token_prob"),
]  # fmt: skip


class Changed(Direct):
    """A drafter whose replies went through `change`."""

    def __init__(self, engine: Any, change: Callable[[DraftBlock], DraftBlock]) -> None:
        super().__init__(engine)
        self._change = change

    async def draft(self, call: DraftCall) -> DraftBlock:
        return self._change(await super().draft(call))


def raises(error: Exception) -> Callable[[DraftBlock], DraftBlock]:
    def change(block: DraftBlock) -> DraftBlock:
        raise error

    return change


def with_statistics(value: float) -> Callable[[DraftBlock], DraftBlock]:
    def change(block: DraftBlock) -> DraftBlock:
        values = np.full(block.num_tokens, value, np.float32)
        return dataclasses.replace(block, confidences=values, max_probs=values)

    return change


FAULTS = {
    "NaN statistics": with_statistics(math.nan),
    "infinite statistics": with_statistics(math.inf),
    "statistics beyond 1": with_statistics(1e30),
    "statistics below 0": with_statistics(-1e30),
    "negative cached_len": lambda block: dataclasses.replace(block, cached_len=-5),
    "InvalidConfig": raises(InvalidConfig("no such effort here")),
    "PrefixMismatch below 0": raises(PrefixMismatch(-7)),
}


async def collect(stream: Any) -> list[TokenChunk]:
    return [chunk async for chunk in stream]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_hostile_drafter_costs_time_and_never_a_token(fault: str, policy: Policy) -> None:
    knowledge = Knowledge()
    for length in (0, 1, 2, 3) * 10:
        knowledge.costs.observe(3, 1e-4, length, 1e-2 + 1e-4 * length)
    drafter = Changed(ScriptedDrafter(greedy_script(TABLE), VOCAB), FAULTS[fault])
    stream = decode(
        make_request([3], max_tokens=14), DecodeConfig(policy=policy), drafter, Direct(TableVerifier(TABLE, VOCAB)),
        tier="t", knowledge=knowledge,
    )  # fmt: skip
    chunks = await collect(stream)
    assert [token for chunk in chunks for token in chunk.token_ids] == plain_greedy(TABLE, [3], 14)
    assert np.all(np.isfinite(knowledge.calibration.estimate(np.linspace(0.0, 1.0, 20))))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rule", [Cactus(0.3), Lenience(0.4), Typical(0.5)], ids=str)
async def test_proposals_may_list_tokens_of_probability_zero(rule: Rule, wide: bool) -> None:
    """Dense rows are legal; a rule that divides by them made the receipt NaN, and the budget with it."""
    if wide and isinstance(rule, Typical):
        pytest.skip("the typical rule needs whole rows")

    def dense(block: DraftBlock) -> DraftBlock:
        rows = np.zeros((block.num_tokens, VOCAB), np.float32)
        rows[block.proposals.row_index(), block.proposals.token_ids] = block.proposals.probs
        splits = np.arange(block.num_tokens + 1, dtype=np.int64) * VOCAB
        ids = np.tile(np.arange(VOCAB, dtype=np.int32), block.num_tokens)
        return dataclasses.replace(block, proposals=SparseRows(splits, ids, rows.ravel()))

    async def run(change: Callable[[DraftBlock], DraftBlock]) -> tuple[list[int], float]:
        # A truncated target: q = p = 0 somewhere.
        request = make_request([3], max_tokens=20, temperature=1.0, top_p=0.7)
        config = DecodeConfig(rule, policy=Static(4), draft_top_k=5, tv_budget=0.3)
        verifier = Direct(TableVerifier(TABLE, VOCAB, wide=wide))
        chunks = await collect(decode(request, config, Changed(TableDrafter(VOCAB), change), verifier, tier="t"))
        receipt = chunks[-1].receipt
        assert receipt is not None
        return [token for chunk in chunks for token in chunk.token_ids], receipt.total_tv

    assert await run(dense) == await run(lambda block: block)
    assert 0.0 < (await run(dense))[1] <= 0.3 + 1e-9


async def test_the_typical_rule_is_refused_before_the_first_token_where_rows_may_be_wide() -> None:
    """With top_p a row is narrow or wide as it comes: the answer broke off in the middle."""
    table = random_table(400, order=2, sharpness=2.5)
    drafter, verifier = Direct(TableDrafter(400)), Direct(TableVerifier(table, 400))
    refused_ones: list[tuple[Typical, dict[str, Any]]] = [
        (Typical(0.5), {"top_p": 0.9}),
        (Typical(0.5), {"top_k": 300}),
    ]
    for rule, sampling in refused_ones:
        request = make_request([3], max_tokens=9, temperature=1.0, **sampling)
        with pytest.raises(InvalidRequest, match="whole target rows") as refused:
            await anext(decode(request, DecodeConfig(rule), drafter, verifier, tier="t"))
        assert refused.value.param == "top_k"
    served: list[tuple[Typical, dict[str, Any]]] = [(Typical(0.5), {"top_k": 256}), (Typical(0.0), {"top_p": 0.9})]
    for rule, sampling in served:
        request = make_request([3], max_tokens=9, temperature=1.0, **sampling)
        chunks = await collect(decode(request, DecodeConfig(rule), drafter, verifier, tier="t"))
        assert sum(len(chunk.token_ids) for chunk in chunks) == 9


async def test_cancelled_while_one_session_is_released_still_releases_the_other() -> None:
    class SlowRelease(Direct):
        async def release(self, session_id: str) -> None:
            releasing.set()
            await asyncio.sleep(60)

    releasing = asyncio.Event()
    drafter = ScriptedDrafter(greedy_script(TABLE), VOCAB)
    verifier = SlowRelease(TableVerifier(TABLE, VOCAB))
    task = asyncio.create_task(
        collect(decode(make_request([3], max_tokens=4), DecodeConfig(), Direct(drafter), verifier, tier="t"))
    )
    await releasing.wait()
    assert drafter.num_sessions == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert drafter.num_sessions == 0


async def test_a_drafter_that_never_said_what_it_is_drafts_nothing() -> None:
    """Its proposals may be made up (trap 3), and the receipt would still say `exact`."""

    class Silent(Direct):
        async def info(self) -> Any:
            raise DrafterUnavailable("not now")

    drafter = TableDrafter(VOCAB, dishonest=True)
    request = make_request([3], max_tokens=9, temperature=1.0)
    stream = decode(request, DecodeConfig(), Silent(drafter), Direct(TableVerifier(TABLE, VOCAB)), tier="exact")
    receipt = (await collect(stream))[-1].receipt
    assert receipt is not None and receipt.exact and receipt.degraded and receipt.num_draft_tokens == 0
