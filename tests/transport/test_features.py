"""Features over every transport."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from specdiff_dist.config import DecodeConfig, Static
from specdiff_dist.core import features as core_features
from specdiff_dist.engine import decode
from specdiff_dist.errors import InvalidRequest, InvalidRows
from tests.doubles import Direct, FeatureDrafter, make_request
from tests.transport.doubles import (
    PROMPT,
    VOCAB,
    Answering,
    draft_call,
    same_arrays,
    scripted_drafter,
    statement,
    table_verifier,
    verify_call,
    with_fields,
)

LAYERS = (1, 4)


def asking(start: int = 0, layers: tuple[int, ...] = LAYERS, **options: Any) -> Any:
    return dataclasses.replace(verify_call(**options), feature_layers=layers, feature_start=start)


async def test_infos_arrive(transport):
    drafter, verifier = FeatureDrafter(VOCAB), table_verifier(num_layers=6)
    assert await (await transport.drafter(drafter)).info() == drafter.info
    assert await (await transport.verifier(verifier)).info() == verifier.info


@pytest.mark.parametrize("wide", [False, True])
async def test_they_arrive_bit_for_bit_both_ways(transport, wide):
    verifier = await transport.verifier(table_verifier(num_layers=6, wide=wide))
    call = asking()
    reply = await verifier.verify(call)
    assert same_arrays(reply, table_verifier(num_layers=6, wide=wide).verify(call))
    assert reply.features is not None and len(reply.features) == len(PROMPT) + 3
    as_bfloat16 = with_fields(features=reply.features.view(np.uint16))  # any bits
    other = await transport.verifier(Answering(table_verifier(num_layers=6, wide=wide), as_bfloat16))
    assert same_arrays((await other.verify(call)).features, reply.features.view(np.uint16))

    engine = FeatureDrafter(VOCAB)
    told = dataclasses.replace(draft_call(), features=reply.features[: len(PROMPT) - 1])
    block = await (await transport.drafter(engine)).draft(told)
    assert block.num_tokens == 4 and engine.num_told == len(PROMPT) - 1


async def test_the_round_loop_gives_the_same_tokens_as_on_the_engines(transport):
    request = make_request(PROMPT, max_tokens=40, temperature=0.9, seed=3)

    async def answer(drafter: Any, verifier: Any) -> list[Any]:
        config = DecodeConfig(policy=Static(3))
        chunks = [chunk async for chunk in decode(request, config, drafter, verifier, tier="exact")]
        assert not any(record.degraded for chunk in chunks for record in chunk.rounds)
        return [(chunk.token_ids, chunk.receipt) for chunk in chunks]

    expected = await answer(Direct(FeatureDrafter(VOCAB)), Direct(table_verifier(num_layers=6)))
    drafter = await transport.drafter(FeatureDrafter(VOCAB))
    assert await answer(drafter, await transport.verifier(table_verifier(num_layers=6))) == expected


async def test_a_call_that_asks_for_what_is_not_there_is_refused(transport):
    verifier = await transport.verifier(table_verifier(num_layers=6))
    for layers in ((6,), (4, 1), (1, 1)):
        with pytest.raises(InvalidRequest, match="feature_layers must ascend within 0 … 5"):
            await verifier.verify(asking(layers=layers))
    with pytest.raises(InvalidRequest, match="feature_start"):
        await verifier.verify(asking(12))
    with pytest.raises(InvalidRequest, match="gives no features"):
        await (await transport.verifier(table_verifier())).verify(asking())


async def test_a_call_that_asks_for_more_than_fits_is_refused(transport, monkeypatch):
    if transport.name == "handle":
        pytest.skip("a replica's process has the limit as it is")
    verifier = await transport.verifier(table_verifier(num_layers=6))
    monkeypatch.setattr(core_features, "MAX_FEATURE_BYTES", 100)
    with pytest.raises(InvalidRequest, match="ask for fewer"):
        await verifier.verify(asking())


async def test_features_of_another_shape_are_refused(transport):
    drafter = await transport.drafter(FeatureDrafter(VOCAB))
    good = np.zeros((len(PROMPT) - 1, 6), np.float16)
    for bad in (None, good[1:], good[:, :5], good.astype(np.float32), np.full_like(good, np.nan)):
        with pytest.raises(InvalidRequest, match=r"drafter 'table': features"):
            await drafter.draft(dataclasses.replace(draft_call(), features=bad))
    plain = await transport.drafter(scripted_drafter())
    with pytest.raises(InvalidRequest, match="takes no features"):
        await plain.draft(dataclasses.replace(draft_call(), features=good))


@pytest.mark.parametrize("bad", [None, np.zeros((3, 6), np.float16), np.full((11, 6), np.inf, np.float16)])
async def test_a_reply_without_the_right_ones_is_refused(transport, bad):
    verifier = await transport.verifier(Answering(table_verifier(num_layers=6), with_fields(features=bad)))
    with pytest.raises(InvalidRows, match="features"):
        await verifier.verify(asking())
    if bad is not None:
        with pytest.raises(InvalidRows, match="not asked for"):
            await verifier.verify(verify_call(statement(session_id="another")))
