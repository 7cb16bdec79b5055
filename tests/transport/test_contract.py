"""The contract of the two roles, held against every transport."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from specdiff_dist.config import DecodeConfig, Linear, Static
from specdiff_dist.core.rows import SparseRows
from specdiff_dist.engine import decode
from specdiff_dist.errors import (
    DrafterUnavailable,
    InvalidConfig,
    InvalidRequest,
    InvalidRows,
    ModelUnavailable,
    PrefixMismatch,
    StaleRound,
    VerifierUnavailable,
)
from specdiff_dist.types import CallCost, SamplingParams
from tests.doubles import make_request
from tests.transport.doubles import (
    PROMPT,
    VOCAB,
    WAIT_S,
    Answering,
    Direct,
    Gated,
    draft_call,
    raising,
    same_arrays,
    scripted_drafter,
    statement,
    table_verifier,
    verify_call,
    with_fields,
)


async def entered(engine: Gated) -> None:
    assert await asyncio.to_thread(engine.entered.wait, WAIT_S)


async def queued(transport, num_calls: int) -> None:
    """Waits until so many calls have arrived at the engines and are not answered."""
    async with asyncio.timeout(WAIT_S):
        while transport.num_queued != num_calls:  # noqa: ASYNC110 -- it changes in the thread of an engine
            await asyncio.sleep(0.002)


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


async def test_dense_rows_of_a_152k_vocabulary(transport):
    """8 positions: 4.9 MB of probabilities, more than gRPC's default limit."""
    dense = np.full(151_936, 1 / 151_936, np.float32)
    rows = SparseRows.from_rows([(np.arange(151_936), dense)] * 8)
    info = dataclasses.replace(table_verifier().info, vocab_size=151_936)
    engine = Answering(table_verifier(), with_fields(rows=rows, row_mass=np.ones(8)))
    engine.info = info
    reply = await (await transport.verifier(engine)).verify(verify_call(draft=(1,) * 7))
    assert same_arrays(reply.rows, rows)


# Errors


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("over the context length", param="max_tokens"),
        InvalidRequest("no field to blame"),
        InvalidConfig("the entropy order needs …"),
        PrefixMismatch(3),
        StaleRound("round 1 after round 2"),
        InvalidRows("NaN"),
    ],
    ids=repr,
)
async def test_an_engines_own_errors_arrive_as_they_are(transport, error):
    drafter = await transport.drafter(Answering(scripted_drafter(), raising(error)))
    verifier = await transport.verifier(Answering(table_verifier(), raising(error)))
    for call in (drafter.draft(draft_call()), verifier.verify(verify_call())):
        with pytest.raises(type(error)) as raised:
            await call
        assert str(raised.value) == str(error)
        assert vars(raised.value) == vars(error)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("canary"), asyncio.CancelledError(), ModelUnavailable("weights"), MemoryError(), KeyError(b"\xff")],
    ids=repr,
)
async def test_a_failing_engine_is_unavailable_and_serves_on(transport, error):
    failing, fine = raising(error), table_verifier()
    engine = Answering(fine, failing)
    drafter = await transport.drafter(Answering(scripted_drafter(), failing))
    verifier = await transport.verifier(engine)
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(DrafterUnavailable) as draft_error:
            await drafter.draft(draft_call())
        with pytest.raises(VerifierUnavailable) as verify_error:
            await verifier.verify(verify_call())
    assert "canary" not in f"{draft_error.value} {verify_error.value}", "what a failing engine says may quote a request"
    engine.change = lambda reply: reply
    assert same_arrays(await verifier.verify(verify_call()), table_verifier().verify(verify_call()))


def _rows(*probs: float, ids: tuple[int, ...] = (1, 2)) -> SparseRows:
    return SparseRows(np.array([0, 2], np.int64), np.array(ids, np.int32), np.array(probs, np.float32))


NONE = SparseRows.from_rows([])


@pytest.mark.parametrize(
    "change",
    [
        with_fields(proposals=NONE),
        with_fields(proposals=SparseRows.one_hot([1, 2])),
        with_fields(proposals=SparseRows(np.arange(5, dtype=np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32))),
        with_fields(proposals=SparseRows.one_hot([1, 2, 3, VOCAB])),
        with_fields(proposals=SparseRows(np.arange(5, dtype=np.int64), np.arange(4, dtype=np.int32), np.ones(4))),  # type: ignore[arg-type]
        with_fields(
            token_ids=np.arange(9, dtype=np.int32),
            proposals=SparseRows.one_hot(np.arange(9)),
            confidences=np.ones(9, np.float32),
            max_probs=np.ones(9, np.float32),
        ),
        with_fields(token_ids=np.arange(4)),
        with_fields(token_ids=np.array([1, 2, 3, -1], np.int32)),
        with_fields(token_ids=np.array([[1, 2, 3, 4]], np.int32)),
        with_fields(confidences=np.zeros(3, np.float32)),
        with_fields(confidences=np.ones(4, np.float16)),
        with_fields(max_probs=np.array([1, 1, np.nan, 1], np.float32)),
    ],
    ids=[
        "no proposals", "two proposals for four tokens", "proposals without entries", "proposal outside the vocabulary",
        "proposals in float64", "more tokens than asked", "tokens in int64", "negative token", "tokens in 2-D",
        "too few confidences", "confidences in float16", "NaN max_prob",
    ],
)  # fmt: skip
async def test_a_malformed_block_is_an_error_never_a_change_of_rule(transport, change):
    drafter = await transport.drafter(Answering(scripted_drafter(), change))
    with pytest.raises(InvalidRows):
        await drafter.draft(draft_call())


@pytest.mark.parametrize(
    "change",
    [
        with_fields(rows=_rows(np.nan, 0.5)),
        with_fields(rows=_rows(np.inf, 0.5)),
        with_fields(rows=_rows(-0.5, 1.5)),
        with_fields(rows=_rows(0.5, 0.4)),
        with_fields(rows=_rows(0.5, 0.5, ids=(1, VOCAB))),
        with_fields(rows=_rows(0.5, 0.5, ids=(2, 1))),
        with_fields(rows=NONE),
        with_fields(rows=SparseRows.one_hot([1, 2])),
        with_fields(row_mass=np.array([np.nan])),
        with_fields(row_mass=np.ones(2)),
        with_fields(plain_token_ids=np.zeros(1, np.int32)),
    ],
    ids=[
        "NaN", "infinity", "negative", "not summing to 1", "outside the vocabulary", "unsorted", "no row", "two rows",
        "NaN mass", "two masses", "plain without recovered tokens",
    ],
)  # fmt: skip
async def test_malformed_narrow_rows_are_an_error(transport, change):
    verifier = await transport.verifier(Answering(table_verifier(), change))
    with pytest.raises(InvalidRows):
        await verifier.verify(verify_call(draft=()))


@pytest.mark.parametrize(
    "change",
    [
        lambda reply: dataclasses.replace(reply, rows=reply.rows.head(1)),
        lambda reply: dataclasses.replace(reply, rows=dataclasses.replace(reply.rows, probs=reply.rows.probs + 0.4)),
        lambda reply: dataclasses.replace(reply, rows=dataclasses.replace(reply.rows, probs=-reply.rows.probs)),
        lambda reply: dataclasses.replace(reply, rows=dataclasses.replace(reply.rows, probs=reply.rows.probs[:-1])),
        with_fields(recovered_token_ids=np.zeros(1, np.int32)),
        with_fields(plain_token_ids=np.array([0, 0, VOCAB], np.int32)),
        with_fields(recovered_token_ids=None),
    ],
    ids=[
        "one row for two", "more than everything", "negative", "a probability missing", "too few recovered",
        "plain outside the vocabulary", "no recovered",
    ],
)  # fmt: skip
async def test_malformed_wide_rows_are_an_error(transport, change):
    verifier = await transport.verifier(Answering(table_verifier(wide=True), change))
    with pytest.raises(InvalidRows):
        await verifier.verify(verify_call(draft=(7, 8)))


def _prefix(**changes: object) -> dict:
    return {"prefix": dataclasses.replace(statement(), **changes)}


@pytest.mark.parametrize(
    "changes",
    [
        _prefix(session_id=""),
        _prefix(session_id="x" * 300),
        _prefix(prefix_len=-1),
        _prefix(round_index=-1),
        _prefix(new_token_ids=np.zeros(0, np.int32)),
        _prefix(new_token_ids=np.zeros(3, np.int64)),
        _prefix(new_token_ids=np.zeros((3, 1), np.int32)),
        _prefix(new_token_ids=np.array([VOCAB], np.int32)),
        _prefix(new_token_ids=np.array([-1], np.int32)),
        {"draft_token_ids": np.array([1, 2, VOCAB], np.int32)},
        {"draft_token_ids": np.array([1, 2, 3], np.float32)},
        {"target_uniforms": np.zeros(3)},
        {"target_uniforms": np.zeros(4, np.float32)},
        {"target_uniforms": np.array([0, 0, 0, np.nan])},
        {"target_uniforms": np.array([0, 0, 0, 1.0])},
        {"target_uniforms": np.zeros(4, bool)},
        {"proposals": None},
    ],
    ids=[
        "no session", "long session id", "negative prefix", "negative round", "no anchor", "tokens in int64",
        "tokens in 2-D", "token outside the vocabulary", "negative token", "draft outside the vocabulary",
        "draft in float32", "too few uniforms", "uniforms in float32", "NaN uniform", "uniform 1", "uniforms in bool",
        "wide without proposals",
    ],
)  # fmt: skip
async def test_a_malformed_verify_call_is_refused(transport, changes):
    engine = table_verifier()
    verifier = await transport.verifier(engine)
    with pytest.raises(InvalidRequest):
        await verifier.verify(dataclasses.replace(verify_call(), **changes))
    assert not engine.calls, "it must not reach the model"


@pytest.mark.parametrize(
    "proposals",
    [NONE, _rows(0.5, 0.5), SparseRows.one_hot([7, 8, VOCAB]), SparseRows.one_hot([7, 8, -1])],
    ids=["none", "one for three", "outside the vocabulary", "negative id"],
)
async def test_malformed_proposals_are_refused(transport, proposals):
    engine = table_verifier()
    verifier = await transport.verifier(engine)
    with pytest.raises(InvalidRows):
        await verifier.verify(dataclasses.replace(verify_call(), proposals=proposals))
    assert not engine.calls


@pytest.mark.parametrize("changes", [{"num_draft_tokens": 0}, {"num_draft_tokens": 65}, {"draft_top_k": 0}], ids=repr)
async def test_a_malformed_draft_call_is_refused(transport, changes):
    drafter = await transport.drafter(scripted_drafter())
    with pytest.raises(InvalidRequest):
        await drafter.draft(dataclasses.replace(draft_call(), **changes))


# Load and cancellation


async def test_a_full_queue_refuses_and_recovers(transport):
    engine = Gated(table_verifier())
    verifier = await transport.verifier(engine, max_queued=2)
    running = asyncio.create_task(verifier.verify(verify_call()))
    await entered(engine)
    waiting = asyncio.create_task(verifier.verify(verify_call()))
    await queued(transport, 2)
    with pytest.raises(VerifierUnavailable, match="2 calls already wait"):
        await verifier.verify(verify_call())
    release = asyncio.create_task(verifier.release("another session"))  # always has room
    engine.gate.set()
    await asyncio.gather(running, waiting, release)
    await verifier.verify(verify_call())


async def test_a_cancelled_call_leaves_the_session_consistent(transport):
    engine = Gated(table_verifier())
    verifier = await transport.verifier(engine)
    call = asyncio.create_task(verifier.verify(verify_call()))
    await entered(engine)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    engine.gate.set()
    assert same_arrays(await verifier.verify(verify_call()), table_verifier().verify(verify_call()))
    await verifier.release("session")
    assert engine.num_sessions == 0


async def test_a_call_cancelled_while_it_waits_never_starts(transport):
    table = table_verifier()
    engine = Gated(table)
    verifier = await transport.verifier(engine)
    running = asyncio.create_task(verifier.verify(verify_call()))
    await entered(engine)
    waiting = asyncio.create_task(verifier.verify(verify_call(statement(session_id="other"))))
    await queued(transport, 2)
    waiting.cancel()
    await asyncio.wait([waiting])
    await queued(transport, 1)
    engine.gate.set()
    await running
    await verifier.release("session")  # comes after anything that waited
    assert [call.prefix.session_id for call in table.calls] == ["session"]
    assert engine.num_sessions == 0


async def test_cancelling_at_any_moment_harms_nothing(transport):
    verifier = await transport.verifier(table_verifier(), max_queued=1)
    expected = table_verifier().verify(verify_call())
    for attempt in range(60):
        call = asyncio.create_task(verifier.verify(verify_call()))
        await asyncio.sleep(attempt % 6 * 0.0005)
        call.cancel()
        await asyncio.wait([call])
    await queued(transport, 0)  # with one place in the queue, one that is never given back would keep all others out
    assert same_arrays(await verifier.verify(verify_call()), expected)


async def test_a_release_survives_the_cancellation_of_its_caller(transport):
    engine = Gated(table_verifier())
    verifier = await transport.verifier(engine)
    running = asyncio.create_task(verifier.verify(verify_call()))
    await entered(engine)
    release = asyncio.create_task(verifier.release("session"))
    await queued(transport, 2)
    release.cancel()
    await asyncio.wait([release])
    await asyncio.sleep(0.05)  # time for a cancellation to travel, which must not take the release with it
    assert transport.num_queued == 2
    engine.gate.set()
    await running
    await verifier.release("another session")
    assert engine.num_sessions == 0


async def test_a_closed_role_is_unavailable(transport):
    drafter, verifier = await transport.drafter(scripted_drafter()), await transport.verifier(table_verifier())
    await drafter.info()
    await drafter.close()
    await transport.close()
    with pytest.raises(DrafterUnavailable):
        await drafter.draft(draft_call())
    with pytest.raises(VerifierUnavailable):
        await verifier.verify(verify_call())
    await verifier.release("session")
