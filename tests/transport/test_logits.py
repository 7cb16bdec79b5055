"""Logit processing and logprobs over every transport: exact, checked, and nothing at all when not asked for."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from specdiff_dist.config import DecodeConfig, Linear, Static
from specdiff_dist.core.logit_processing import LogitProcessing
from specdiff_dist.core.rows import SparseRows
from specdiff_dist.core.rules import Cactus
from specdiff_dist.engine import decode
from specdiff_dist.errors import InvalidRequest, InvalidRows
from specdiff_dist.pb import roles_pb2 as pb
from specdiff_dist.transport import codec
from specdiff_dist.types import ResolveCall, SamplingParams, VerifyCall
from tests.doubles import make_request
from tests.transport.doubles import (
    PROMPT,
    VOCAB,
    Answering,
    Direct,
    same_arrays,
    scripted_drafter,
    table_verifier,
    verify_call,
    with_fields,
)

PROCESSING = LogitProcessing(0.1 + 0.2, -1.5, 1.3, (0, 49, 7), (1 / 3, -100.0, 0.5), 12, tuple(range(0, VOCAB, 3)))


def asking(**fields: Any) -> VerifyCall:
    stated = {
        "processing": PROCESSING,
        "num_prompt_tokens": 5,
        "ending_token_ids": (2, 40),
        "num_logprobs": 4,
        **fields,
    }
    return dataclasses.replace(verify_call(), **stated)


async def test_the_engine_gets_what_was_asked(transport):
    engine = table_verifier()
    verifier = await transport.verifier(engine)
    for call in (asking(), asking(num_logprobs=0), asking(processing=LogitProcessing(min_tokens=1))):
        await verifier.verify(call)
        assert same_arrays(engine.calls[-1], call)
    sampling = SamplingParams(0.7, 5, 0.9, 1 / 3)
    await verifier.verify(verify_call(sampling=sampling))
    assert engine.calls[-1].sampling == sampling


@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
async def test_logprobs_arrive_bit_for_bit(transport, wide):
    verifier = await transport.verifier(table_verifier(wide=wide))
    for call in (asking(), asking(num_logprobs=0), asking(num_logprobs=20), asking(draft_token_ids=np.zeros(0, np.int32),
                 proposals=SparseRows.from_rows([]), target_uniforms=np.array([0.5]))):  # fmt: skip
        reply = await verifier.verify(call)
        assert reply.logprobs is not None
        assert same_arrays(reply, table_verifier(wide=wide).verify(call))


async def test_a_resolved_token_brings_its_logprob(transport):
    call = asking(hold_rows=True)
    assert call.proposals is not None
    direct, verifier = table_verifier(wide=True), await transport.verifier(table_verifier(wide=True))
    direct.verify(call)
    await verifier.verify(call)
    row = SparseRows.from_rows([call.proposals.row(1)])
    resolve = ResolveCall(call.prefix.session_id, call.prefix.round_index, 1, 0.5, 0.3, row)
    resolved = await verifier.resolve(resolve)
    assert (resolved.token_id, resolved.logprob) == pytest.approx(dataclasses.astuple(direct.resolve(resolve))[::2])


@pytest.mark.parametrize("rule", [Linear(0.3), Cactus(0.4)], ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
async def test_answers_are_the_same_over_every_transport(transport, wide, rule):
    request = make_request(
        PROMPT, max_tokens=40, temperature=0.9, seed=3, num_logprobs=2,
        processing=LogitProcessing(0.5, 0.2, 1.2, (4,), (2.0,), min_tokens=20),
    )  # fmt: skip
    config = DecodeConfig(rule, policy=Static(3))

    async def answer(drafter, verifier) -> list:
        chunks = [chunk async for chunk in decode(request, config, drafter, verifier, tier="fast")]
        return [(chunk.token_ids, [one.top_token_ids for one in chunk.logprobs]) for chunk in chunks]

    engine = {"wide": wide, "eos_token_ids": (1, 2)}
    over = await answer(await transport.drafter(scripted_drafter()), await transport.verifier(table_verifier(**engine)))
    assert over == await answer(Direct(scripted_drafter()), Direct(table_verifier(**engine)))


def test_a_simple_call_and_its_reply_carry_nothing_of_it():
    call = verify_call()
    request = pb.VerifyRequest.FromString(codec.encode_verify_call(call))
    reply = pb.VerifyReply.FromString(codec.encode_target_rows(table_verifier().verify(call)))
    assert max(field.number for field, _ in request.ListFields()) < 9
    assert max(field.number for field, _ in reply.ListFields()) < 8
    assert max(field.number for field, _ in request.sampling.ListFields()) < 4


@pytest.mark.parametrize(
    "fields",
    [
        {"num_logprobs": 21}, {"num_logprobs": 2**31 - 1}, {"num_prompt_tokens": 9}, {"ending_token_ids": (VOCAB,)},
        {"processing": LogitProcessing(bias_token_ids=(VOCAB,), biases=(1.0,))},
        {"processing": LogitProcessing(allowed_token_ids=(2**31,))},
        {"processing": LogitProcessing(min_tokens=1, allowed_token_ids=(2, 40))},
    ],
    ids=str,
)  # fmt: skip
async def test_what_cannot_be_served_is_refused_where_it_arrives(transport, fields):
    verifier = await transport.verifier(table_verifier())
    with pytest.raises(InvalidRequest):
        await verifier.verify(asking(**fields))


def test_parameters_out_of_range_are_refused_in_decoding():
    request = pb.VerifyRequest.FromString(codec.encode_verify_call(asking()))
    for name, value in (("frequency_penalty", float("nan")), ("repetition_penalty", 0.0), ("presence_penalty", 3.0)):
        broken = pb.VerifyRequest.FromString(request.SerializeToString())
        setattr(broken.processing, name, value)
        with pytest.raises(InvalidRequest, match=name):
            codec.decode_verify_call(broken.SerializeToString())
    request.processing.biases.append(1.0)
    with pytest.raises(InvalidRequest, match="logit_bias"):
        codec.decode_verify_call(request.SerializeToString())


def broken_logprobs(**changes: Any) -> Any:
    return lambda reply: dataclasses.replace(reply, logprobs=dataclasses.replace(reply.logprobs, **changes))


@pytest.mark.parametrize(
    "change",
    [
        with_fields(logprobs=None),
        broken_logprobs(draft=np.zeros(2, np.float32)),
        broken_logprobs(draft=np.full(3, np.nan, np.float32)),
        broken_logprobs(draft=np.full(3, 0.5, np.float32)),
        broken_logprobs(draft=np.zeros(3)),
        broken_logprobs(entries=None),
        broken_logprobs(top=np.zeros((4, 3), np.float32)),
        broken_logprobs(top_token_ids=np.full((4, 4), VOCAB, np.int32)),
        broken_logprobs(top_token_ids=np.zeros((4, 4), np.int64)),
    ],
)
async def test_logprobs_that_are_none_are_refused(transport, change):
    verifier = await transport.verifier(Answering(table_verifier(), change))
    with pytest.raises(InvalidRows):
        await verifier.verify(asking())


async def test_logprobs_nobody_asked_for_are_refused(transport):
    known = table_verifier().verify(asking()).logprobs
    verifier = await transport.verifier(Answering(table_verifier(), with_fields(logprobs=known)))
    with pytest.raises(InvalidRows):
        await verifier.verify(verify_call())
