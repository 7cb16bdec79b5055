"""The contract of the two roles, held against every transport: errors, malformed calls and malformed replies."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from specdiff_dist.core.rows import SparseRows
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
from tests.transport.doubles import (
    VOCAB,
    WAIT_S,
    Answering,
    draft_call,
    raising,
    same_arrays,
    scripted_drafter,
    statement,
    table_verifier,
    verify_call,
    with_fields,
)


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
    [
        RuntimeError("canary"), asyncio.CancelledError(), ModelUnavailable("weights"), MemoryError(), KeyError(b"\xff"),
        StopIteration("canary"),
    ],
    ids=repr,
)  # fmt: skip
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
