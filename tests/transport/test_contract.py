"""The contract of the two roles, held against every transport: replies and prefixes."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from specdiff_dist.config import DecodeConfig, Linear, Static
from specdiff_dist.core.rows import SparseRows
from specdiff_dist.engine import decode
from specdiff_dist.errors import (
    InvalidRequest,
    PrefixMismatch,
    StaleRound,
)
from specdiff_dist.types import CallCost, ResolveCall, SamplingParams
from tests.doubles import make_request
from tests.transport.doubles import (
    PROMPT,
    VOCAB,
    Answering,
    Direct,
    Gated,
    draft_call,
    entered,
    queued,
    same_arrays,
    scripted_drafter,
    statement,
    table_verifier,
    verify_call,
    with_fields,
)

# Replies


async def test_info(transport):
    drafter, verifier = scripted_drafter(), table_verifier(eos_token_ids=(2, 3))
    assert await (await transport.drafter(drafter)).info() == drafter.info
    assert await (await transport.verifier(verifier)).info() == verifier.info


@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize("draft", [(), (7,), (7, 8, 9, 0)], ids=len)
async def test_target_rows_arrive_bit_for_bit(transport, wide, draft):
    call = verify_call(draft=draft)
    reply = await (await transport.verifier(table_verifier(wide=wide))).verify(call)
    assert reply.is_wide == wide
    assert same_arrays(reply, table_verifier(wide=wide).verify(call))


async def test_one_wide_row_is_resolved_alike(transport):
    """Rules whose residual depends on the rejected token send for one draw; it is gone after the next call."""
    call = dataclasses.replace(verify_call(draft=(7, 8)), hold_rows=True)
    direct = table_verifier(wide=True)
    direct.verify(call)
    verifier = await transport.verifier(table_verifier(wide=True))
    await verifier.verify(call)
    assert call.proposals is not None
    for position in (0, 1):
        row = SparseRows.from_rows([call.proposals.row(position)])
        for scale, uniform in ((1.0, 0.3), (0.25, 0.9), (0.0, 0.5)):
            wanted = ResolveCall(call.prefix.session_id, call.prefix.round_index, position, scale, uniform, row)
            assert (await verifier.resolve(wanted)).token_id == direct.resolve(wanted).token_id
    row = SparseRows.from_rows([call.proposals.row(0)])
    for session_id, round_index in (("another", call.prefix.round_index), (call.prefix.session_id, 99)):
        with pytest.raises(PrefixMismatch):
            await verifier.resolve(ResolveCall(session_id, round_index, 0, 0.5, 0.5, row))
    for scale, uniform in ((1.5, 0.5), (0.5, 1.0), (float("nan"), 0.5)):
        with pytest.raises(InvalidRequest):
            await verifier.resolve(ResolveCall(call.prefix.session_id, 0, 0, scale, uniform, row))


async def test_tokens_already_drafted_are_continued(transport):
    drafter = await transport.drafter(scripted_drafter())
    whole = await drafter.draft(draft_call(num_draft_tokens=5))
    call = draft_call(num_draft_tokens=2)
    more = await drafter.draft(dataclasses.replace(call, drafted_token_ids=whole.token_ids[:3]))
    assert more.token_ids.tolist() == whole.token_ids[3:].tolist()


async def test_draft_blocks_arrive_bit_for_bit(transport):
    rng = np.random.default_rng(1)
    rows = SparseRows.from_rows([(rng.choice(VOCAB, 9, replace=False), rng.dirichlet(np.ones(9))) for _ in range(4)])
    odd = with_fields(
        token_ids=rows.token_ids[rows.row_splits[:-1]],
        proposals=rows,
        confidences=np.array([0.1, 1e-45, -0.0, 1.0], np.float32),  # a denormal and a signed zero survive, too
        max_probs=np.nextafter(np.ones(4, np.float32), np.float32(0)),
    )
    block = await (await transport.drafter(Answering(scripted_drafter(), odd))).draft(draft_call())
    assert same_arrays(block, odd(scripted_drafter().draft(draft_call())))


async def test_an_empty_block_is_fine(transport):
    engine = Answering(scripted_drafter(), lambda block: block.head(0))
    assert (await (await transport.drafter(engine)).draft(draft_call())).num_tokens == 0


@pytest.mark.parametrize("seed", [0, 2**63 + 1, 2**127 - 1, -1, -(2**63)])
async def test_the_engine_gets_the_call_as_it_was_made(transport, seed):
    drafter, verifier = scripted_drafter(), table_verifier()
    draft, verify = draft_call(seed=seed), verify_call(sampling=SamplingParams(0.7, 10**12, 0.9))
    await (await transport.drafter(drafter)).draft(draft)
    await (await transport.verifier(verifier)).verify(verify)
    assert same_arrays(drafter.calls[0], draft)
    assert same_arrays(verifier.calls[0], verify)
    assert verifier.calls[
        0
    ].prefix.new_token_ids.flags.writeable  # engines hand arrays to torch, which wants to own them


async def test_the_same_call_twice_gives_the_same_reply(transport):
    drafter, verifier = await transport.drafter(scripted_drafter()), await transport.verifier(table_verifier())
    assert same_arrays(await drafter.draft(draft_call()), await drafter.draft(draft_call()))
    assert same_arrays(await verifier.verify(verify_call()), await verifier.verify(verify_call()))


async def test_costs_are_measured(transport):
    engine = Gated(table_verifier())
    verifier = await transport.verifier(engine)
    first = asyncio.create_task(verifier.verify(verify_call()))
    await entered(engine)
    second = asyncio.create_task(verifier.verify(verify_call()))
    await queued(transport, 2)
    await asyncio.sleep(0.05)
    engine.gate.set()
    first_cost, second_cost = (await first).cost, (await second).cost
    assert first_cost.forward_s == 1e-6, "the engine's own measure is kept"
    assert first_cost.num_forwards == 1
    assert first_cost.wall_s >= 0.05
    assert second_cost.queue_s >= 0.05
    assert first_cost.queue_s < first_cost.wall_s - 0.05
    over_the_wire = transport.name != "local"
    assert (first_cost.bytes_sent > 100) == (first_cost.bytes_received > 100) == over_the_wire


async def test_an_engine_that_does_not_time_itself_is_timed(transport):
    drafter = await transport.drafter(Answering(scripted_drafter(), with_fields(cost=CallCost())))
    assert (await drafter.draft(draft_call())).cost.forward_s > 0


@pytest.mark.parametrize(("wide", "temperature"), [(False, 0.0), (False, 0.9), (True, 0.9)])
async def test_decode_gives_the_same_tokens_over_every_transport(transport, wide, temperature):
    """Against the round loop on engines called directly, numbers and receipts included."""
    request = make_request(PROMPT, max_tokens=60, temperature=temperature, seed=3)
    config = DecodeConfig(Linear(0.2), policy=Static(3))

    async def answer(drafter, verifier) -> list:
        chunks = [chunk async for chunk in decode(request, config, drafter, verifier, tier="fast")]
        return [(chunk.token_ids, chunk.finish_reason, chunk.receipt) for chunk in chunks]

    drafter, verifier = await transport.drafter(scripted_drafter()), await transport.verifier(table_verifier(wide=wide))
    expected = await answer(Direct(scripted_drafter()), Direct(table_verifier(wide=wide)))
    assert await answer(drafter, verifier) == expected
    assert not expected[-1][2].degraded
    assert expected[-1][2].num_accepted_tokens > 0


# The prefix


async def test_a_replica_that_has_less_says_what_it_has(transport):
    drafter, verifier = await transport.drafter(scripted_drafter()), await transport.verifier(table_verifier())
    with pytest.raises(PrefixMismatch) as none_cached:
        await drafter.draft(draft_call(statement(cached=5)))
    assert none_cached.value.cached_len == 0
    await verifier.verify(verify_call(statement(PROMPT[:4]), draft=()))
    with pytest.raises(PrefixMismatch) as less_cached:
        await verifier.verify(verify_call(statement(cached=7, round_index=1)))
    assert less_cached.value.cached_len == 4
    await verifier.verify(verify_call(statement(cached=4, round_index=1)))


async def test_another_prefix_of_the_same_length_is_not_served(transport):
    verifier = await transport.verifier(table_verifier())
    await verifier.verify(verify_call())
    other = (*PROMPT[:-1], 40, 41)
    with pytest.raises(PrefixMismatch) as mismatch:
        await verifier.verify(verify_call(statement(other, cached=8, round_index=1)))
    assert mismatch.value.cached_len == 0


async def test_an_older_round_is_stale(transport):
    drafter, verifier = await transport.drafter(scripted_drafter()), await transport.verifier(table_verifier())
    await drafter.draft(draft_call(statement(round_index=5)))
    await verifier.verify(verify_call(statement(round_index=5)))
    with pytest.raises(StaleRound):
        await drafter.draft(draft_call(statement(round_index=4)))
    with pytest.raises(StaleRound):
        await verifier.verify(verify_call(statement(round_index=4)))


async def test_the_next_round_crops_rejected_tokens(transport):
    verifier = await transport.verifier(table_verifier())
    first = await verifier.verify(verify_call(draft=(7, 8, 9)))
    assert first.cached_len == len(PROMPT) + 3
    committed = (*PROMPT, 7, 30)  # 7 accepted, 8 rejected
    cropped = verify_call(statement(committed, cached=len(PROMPT) + 1, round_index=1), draft=(11, 12))
    fresh = verify_call(statement(committed, session_id="fresh"), draft=(11, 12))
    assert same_arrays(await verifier.verify(cropped), await verifier.verify(fresh))


async def test_release_frees(transport):
    drafter_engine, verifier_engine = scripted_drafter(), table_verifier()
    drafter, verifier = await transport.drafter(drafter_engine), await transport.verifier(verifier_engine)
    await drafter.draft(draft_call())
    await verifier.verify(verify_call())
    assert (drafter_engine.num_sessions, verifier_engine.num_sessions) == (1, 1)
    for session_id in ("session", "session", "never seen"):
        await drafter.release(session_id)
        await verifier.release(session_id)
    assert (drafter_engine.num_sessions, verifier_engine.num_sessions) == (0, 0)
    with pytest.raises(PrefixMismatch):
        await verifier.verify(verify_call(statement(cached=3, round_index=1)))


async def test_sessions_do_not_touch_each_other(transport):
    """24 sessions of lengths 1 … 24 in step, each equal to its solo run."""
    verifier = await transport.verifier(table_verifier(wide=True))

    async def rounds(index: int) -> list:
        tokens = tuple(np.random.default_rng(index).integers(VOCAB, size=index + 1).tolist())
        replies, cached = [], 0
        for round_index in range(4):
            prefix = statement(tokens, cached=cached, round_index=round_index, session_id=f"session {index}")
            reply = await verifier.verify(verify_call(prefix, draft=(index, round_index)))
            replies.append(reply)
            assert reply.plain_token_ids is not None
            cached, tokens = len(tokens), (*tokens, int(reply.plain_token_ids[0]))
        return replies

    together = await asyncio.gather(*(rounds(index) for index in range(24)))
    for index in range(24):
        await verifier.release(f"session {index}")
        alone = await rounds(index)
        assert all(same_arrays(one, other) for one, other in zip(together[index], alone, strict=True))


async def test_a_prompt_of_200k_tokens(transport):
    prompt = tuple(np.random.default_rng(0).integers(VOCAB, size=200_000).tolist())
    call = verify_call(statement(prompt), draft=(1, 2))
    verifier = await transport.verifier(table_verifier(max_model_len=300_000))
    assert same_arrays(await verifier.verify(call), table_verifier(max_model_len=300_000).verify(call))


def dense_rows(num_rows: int) -> SparseRows:
    return SparseRows.from_rows([(np.arange(151_936), np.full(151_936, 1 / 151_936, np.float32))] * num_rows)


async def test_dense_rows_of_a_152k_vocabulary(transport):
    """8 positions: 4.9 MB of probabilities, more than gRPC's default limit."""
    rows = dense_rows(8)
    info = dataclasses.replace(table_verifier().info, vocab_size=151_936)
    engine = Answering(table_verifier(), with_fields(rows=rows, row_mass=np.ones(8)))
    engine.info = info
    reply = await (await transport.verifier(engine)).verify(verify_call(draft=(1,) * 7))
    assert same_arrays(reply.rows, rows)


async def test_dense_proposals_of_a_152k_vocabulary(transport):
    """Both ways: from a drafter, and to a verifier. Over handles they travel by reference."""
    rows, ones = dense_rows(8), np.ones(8, np.float32)
    block = with_fields(token_ids=np.ones(8, np.int32), proposals=rows, confidences=ones, max_probs=ones)
    drafter, verifier = Answering(scripted_drafter(), block), Answering(table_verifier(), lambda reply: reply)
    for engine in (drafter, verifier):
        engine.info = dataclasses.replace(engine.info, vocab_size=151_936)
    drafted = await (await transport.drafter(drafter)).draft(draft_call(num_draft_tokens=8))
    assert same_arrays(drafted.proposals, rows)
    call = dataclasses.replace(verify_call(draft=(1,) * 8), proposals=rows)
    await (await transport.verifier(verifier)).verify(call)
    assert same_arrays(verifier.engine.calls[0], call)
