"""Features through the round loop: who is told what, and that losing a replica loses none of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from specdiff_dist.config import DecodeConfig, Off, Static
from specdiff_dist.core import features as core_features
from specdiff_dist.core.features import FeatureRows, check_features, fault
from specdiff_dist.core.speculation import FailFast
from specdiff_dist.drafters.combined import CombinedDrafter
from specdiff_dist.engine import decode
from specdiff_dist.errors import InvalidConfig, InvalidRows
from specdiff_dist.types import DraftBlock, DraftCall, TargetRows, TokenChunk, VerifyCall
from tests.chunks import tokens_of
from tests.doubles import Direct, FeatureDrafter, ScriptedDrafter, TableVerifier, make_request, random_table

VOCAB = 12
TABLE = random_table(VOCAB, order=3)
PROMPT = (3, 1, 4, 1, 5)


def verifier(**options: Any) -> TableVerifier:
    return TableVerifier(TABLE, VOCAB, **{"num_layers": 6, **options})


async def answer(drafter: Any, judge: Any, policy: Any = None, **options: Any) -> list[TokenChunk]:
    request = make_request(PROMPT, **{"max_tokens": 40, "temperature": 1.0, "seed": 5, **options})
    config = DecodeConfig(policy=policy or Static(3))
    return [chunk async for chunk in decode(request, config, drafter, judge, tier="exact")]


@pytest.mark.parametrize("wide", [False, True])
async def test_the_first_round_is_plain_and_then_every_token_is_told_once(wide):
    drafter, judge = FeatureDrafter(VOCAB), verifier(wide=wide)
    chunks = await answer(Direct(drafter), Direct(judge))
    receipt = chunks[-1].receipt
    assert receipt is not None and receipt.exact and not receipt.degraded and receipt.num_accepted_tokens > 0
    assert chunks[0].rounds[0].num_drafted == 0 and chunks[1].rounds[0].num_drafted == 3
    committed = len(PROMPT) + sum(len(chunk.token_ids) for chunk in chunks)
    assert committed - 6 <= drafter.num_told < committed  # all but the last round's
    assert all(call.feature_layers == (1, 4) for call in judge.calls)
    assert all(call.feature_start == max(call.prefix.prefix_len, 0) for call in judge.calls)


async def test_a_prompt_of_one_token_can_be_drafted_after_at_once():
    chunks = [
        chunk
        async for chunk in decode(
            make_request((3,), max_tokens=8), DecodeConfig(policy=Static(3)), Direct(FeatureDrafter(VOCAB)),
            Direct(verifier()), tier="exact",
        )
    ]  # fmt: skip
    assert chunks[0].rounds[0].num_drafted == 3


async def test_who_needs_no_features_costs_none():
    judge = verifier()
    await answer(Direct(ScriptedDrafter(lambda prefix, n: [0] * n, VOCAB)), Direct(judge))
    off = verifier()
    await answer(Direct(FeatureDrafter(VOCAB)), Direct(off), Off())
    assert all(call.feature_layers == () for call in [*judge.calls, *off.calls])


class Forgetful(Direct):
    """Drops the session's cache before some calls, as a lost replica would."""

    def __init__(self, engine: Any, every: int) -> None:
        super().__init__(engine)
        self._count, self._every = 0, every

    def _lose(self, session_id: str) -> None:
        self._count += 1
        if self._count % self._every == 0:
            self._engine.release(session_id)

    async def draft(self, call: DraftCall) -> DraftBlock:
        self._lose(call.prefix.session_id)
        return await super().draft(call)

    async def verify(self, call: VerifyCall) -> TargetRows:
        self._lose(call.prefix.session_id)
        return await super().verify(call)


@pytest.mark.parametrize("policy", [Static(3), FailFast(0.0, 2, 4, "max_prob")], ids=["one call", "several calls"])
async def test_lost_replicas_change_no_token(policy):
    class Stable(FeatureDrafter):
        """Its rows depend on all features at once, so that they are the same however they arrive."""

        def _predict(self, prefix: Any, sampling: Any, call: DraftCall) -> Any:
            told = self._sessions.get(call.prefix.session_id).cache
            held = FeatureRows(told.size)
            held.extend(told.of(0, min(call.prefix.prefix_len, told.length)))
            assert call.features is not None
            held.extend(call.features)
            seen = tuple(held.of(0, held.length).view(np.uint16).ravel().tolist())
            return super(FeatureDrafter, self)._predict((*seen, *prefix), sampling, call)

    expected = tokens_of(await answer(Direct(Stable(VOCAB)), Direct(verifier()), policy))
    lost_drafter = await answer(Forgetful(Stable(VOCAB), 3), Direct(verifier()), policy)
    assert tokens_of(lost_drafter) == expected
    judge = verifier()
    lost_verifier = await answer(Direct(Stable(VOCAB)), Forgetful(judge, 3), policy)
    assert tokens_of(lost_verifier) == expected
    receipt = lost_verifier[-1].receipt
    assert receipt is not None and receipt.verifier_rebuilds > 0
    rebuilt = [call for call in judge.calls if call.prefix.prefix_len == 0 and call.prefix.round_index > 0]
    assert rebuilt and all(call.feature_start > 0 for call in rebuilt)  # known ones are not asked for again


async def test_long_stretches_go_in_pieces(monkeypatch):
    """No call or reply carries the features of more tokens than fit."""
    monkeypatch.setattr(core_features, "MAX_FEATURE_BYTES", 2 * 6 * 7)  # 7 tokens
    prompt = [i % VOCAB for i in range(40)]
    drafter, judge = FeatureDrafter(VOCAB), verifier()
    request = make_request(prompt, max_tokens=20, temperature=1.0, seed=2)
    stream = decode(request, DecodeConfig(policy=Static(3)), Forgetful(drafter, 23), Forgetful(judge, 29), tier="exact")
    chunks = [chunk async for chunk in stream]
    assert max(call.num_feature_rows for call in judge.calls) == 7
    assert len(tokens_of(chunks)) == 20 and sum(record.num_drafted for c in chunks for record in c.rounds) > 10
    assert not any(record.degraded for chunk in chunks for record in chunk.rounds)


async def test_the_combined_drafter_restates_features_to_the_inner_one():
    inner = FeatureDrafter(VOCAB)
    combined = CombinedDrafter(Direct(inner), expected_acceptance=(0.3,))
    assert (await combined.info()).feature_layers == (1, 4)
    chunks = await answer(combined, Direct(verifier()), max_tokens=60)
    copied = [record for chunk in chunks for record in chunk.rounds if record.num_drafted]
    assert len(copied) > 5 and inner.num_told > len(PROMPT)
    assert not any(record.degraded for record in copied)
    forgetful = CombinedDrafter(Forgetful(inner, 4), expected_acceptance=(0.3,))
    lost = await answer(forgetful, Direct(verifier()), max_tokens=60)
    assert not any(record.degraded for chunk in lost for record in chunk.rounds)


async def test_the_inner_drafter_is_told_in_pieces_what_long_copies_have_left(monkeypatch):
    class Told(FeatureDrafter):
        def draft(self, call: DraftCall) -> DraftBlock:
            told.append(len(call.prefix.new_token_ids))
            return super().draft(call)

    monkeypatch.setattr(core_features, "MAX_FEATURE_BYTES", 2 * 6 * 7)  # 7 tokens
    told: list[int] = []
    prompt = [i % VOCAB for i in range(40)]  # invites copying, so that the inner one falls behind
    combined = CombinedDrafter(Forgetful(Told(VOCAB), 61), expected_acceptance=(0.5,))
    request = make_request(prompt, max_tokens=200, temperature=1.0, seed=2)
    stream = decode(request, DecodeConfig(policy=Static(3)), combined, Direct(verifier()), tier="exact")
    chunks = [chunk async for chunk in stream]
    assert max(told) == 8 and sum(told) > 80  # told everything, several times over
    assert not any(record.degraded for chunk in chunks for record in chunk.rounds)


async def test_a_session_that_only_copies_moves_no_features():
    inner, judge = FeatureDrafter(VOCAB), verifier()
    combined = CombinedDrafter(Direct(inner))
    chunks = await answer(combined.copying(), Direct(judge), max_tokens=60)
    assert sum(record.num_verified for chunk in chunks for record in chunk.rounds) > 0
    assert inner.num_told == 0 and all(call.feature_layers == () for call in judge.calls)


def test_a_verifier_that_cannot_give_them_is_refused_with_the_next_step():
    info = FeatureDrafter(VOCAB).info
    check_features(info, verifier().info)
    check_features(None, verifier(num_layers=0).info)
    check_features(ScriptedDrafter(lambda prefix, n: [], VOCAB).info, verifier(num_layers=0).info)
    with pytest.raises(
        InvalidConfig, match=r"drafter 'table' needs hidden states of verifier layers 1, 4.*gives none; use"
    ):
        check_features(info, verifier(num_layers=0).info)
    with pytest.raises(InvalidConfig, match="trained for another verifier"):
        check_features(info, verifier(num_layers=4).info)
    with pytest.raises(InvalidConfig, match="trained for another verifier"):
        check_features(dataclasses.replace(info, feature_size=4), verifier().info)


async def test_decode_refuses_it_before_the_first_chunk():
    judge = verifier(num_layers=0)
    with pytest.raises(InvalidConfig, match="gives none"):
        await answer(Direct(FeatureDrafter(VOCAB)), Direct(judge))
    assert judge.calls == []


@pytest.mark.parametrize("bad", [None, np.zeros((1, 6), np.float16), np.zeros((5, 6), np.float32)])
async def test_a_reply_with_other_features_than_asked_for_is_an_error(bad):
    class Lying(TableVerifier):
        def verify(self, call: VerifyCall) -> TargetRows:
            return dataclasses.replace(super().verify(call), features=bad)

    with pytest.raises(InvalidRows, match=r"features .*\[5, 6\]"):
        await answer(Direct(FeatureDrafter(VOCAB)), Direct(Lying(TABLE, VOCAB, num_layers=6)))


def test_broken_numbers_are_told():
    good = np.ones((2, 3), np.float16)
    assert fault(good, 2, 3) is None and fault(good.view(np.uint16), 2, 3) is None
    for bad in (np.float16("nan"), np.float16("inf")):
        broken = good.copy()
        broken[1, 1] = bad
        assert fault(broken, 2, 3) == "features: NaN or infinite"
    for bits in (0x7F80, 0xFF80, 0x7FC1):  # bfloat16 infinities and NaN
        broken = good.view(np.uint16).copy()
        broken[0, 0] = bits
        assert fault(broken, 2, 3) == "features: NaN or infinite"


def test_rows_grow_are_cut_back_and_keep_their_precision():
    rows = FeatureRows(2)
    rows.extend(np.array([[0x3F80, 0xC000]], np.uint16))  # 1, -2 as bfloat16
    rows.extend(np.array([[1.0, 65504.0]], np.float16))
    assert rows.of(0, 2).tolist() == [[0x3F80, 0xC000], [0x3F80, 0x4780]]
    many = np.full((200, 2), 7, np.uint16)
    rows.extend(many)
    assert rows.length == 202 and rows.of(0, 1).tolist() == [[0x3F80, 0xC000]]
    rows.crop(1)
    assert rows.length == 1
    halves = FeatureRows(1)
    halves.extend(np.array([[0.5]], np.float16))
    halves.extend(np.array([[0x3F80], [0x7F7F]], np.uint16))  # the largest bfloat16 is cut
    assert halves.of(0, 3).ravel().tolist() == [0.5, 1.0, 65504.0]
