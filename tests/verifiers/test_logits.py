"""Processing and logprobs, against code that goes position by position and against transformers' own processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from specdiff_dist.core.logit_processing import LogitProcessing
from specdiff_dist.core.rows import SparseRows
from specdiff_dist.errors import InvalidRequest, InvalidRows
from specdiff_dist.types import PrefixStatement, ResolveCall, SamplingParams, VerifyCall, prefix_crc
from specdiff_dist.verifiers.held_rows import HeldRows
from specdiff_dist.verifiers.logits import process_logits
from specdiff_dist.verifiers.target_rows import target_rows
from tests.plain_logits import log_softmax, processed_rows

VOCAB = 300


def make_call(tokens: list[int], num_draft: int, num_prompt: int, **fields: Any) -> VerifyCall:
    """A call whose committed and draft tokens are `tokens`."""
    ids = np.array(tokens, np.int32)
    committed, draft = ids[: len(ids) - num_draft], ids[len(ids) - num_draft :]
    prefix = PrefixStatement("s", 0, 0, prefix_crc(ids[:0]), committed)
    sampling = fields.pop("sampling", SamplingParams())
    proposals = SparseRows.one_hot(draft)
    uniforms = np.linspace(0.1, 0.9, num_draft + 1)
    return VerifyCall(prefix, draft, sampling, proposals, uniforms, num_prompt_tokens=num_prompt, **fields)


def random_processing(rng: np.random.Generator) -> LogitProcessing:
    ids, num_biases = rng.choice(VOCAB, 3, replace=False).tolist(), int(rng.integers(4))
    return LogitProcessing(
        frequency_penalty=float(rng.choice([0.0, 1.5, -1.5])),
        presence_penalty=float(rng.choice([0.0, 0.7, -2.0])),
        repetition_penalty=float(rng.choice([1.0, 1.3, 0.8])),
        bias_token_ids=tuple(ids[:num_biases]),
        biases=(5.0, -100.0, 0.25)[:num_biases],
        min_tokens=int(rng.integers(12)),
        allowed_token_ids=tuple(range(0, VOCAB, 2)) if rng.random() < 0.3 else (),
    )


def test_every_position_sees_the_tokens_before_it_drafts_included():
    rng = np.random.default_rng(0)
    for _ in range(60):
        processing = random_processing(rng)
        num_draft, num_prompt = int(rng.integers(5)), int(rng.integers(1, 6))
        tokens = rng.integers(0, 12, num_prompt + num_draft + int(rng.integers(8))).tolist()  # few, so they repeat
        call = make_call(tokens, num_draft, num_prompt, processing=processing, ending_token_ids=(2, 5))
        logits = torch.from_numpy(3.0 * rng.standard_normal((num_draft + 1, VOCAB)).astype(np.float32))
        before = logits.clone()
        got = process_logits(logits, call, np.array(tokens, np.int32)).numpy()
        wanted = np.stack(processed_rows(list(logits.numpy()), call, tuple(tokens)))
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-5)
        np.testing.assert_array_equal(np.isinf(got), np.isinf(wanted))
        assert torch.equal(logits, before)  # the model's own, which logprobs are read from


def test_repetition_penalty_is_transformers_own():
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    tokens = [3, 7, 7, 250, 1]
    call = make_call(tokens, 0, 2, processing=LogitProcessing(repetition_penalty=1.3))
    ids: Any = torch.tensor([tokens])
    expected = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits.clone())  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(process_logits(logits, call, np.array(tokens, np.int32)), expected)


@pytest.mark.parametrize("sampling", [SamplingParams(0.7, min_p=0.2), SamplingParams(1.0, 0, 0.9, min_p=0.05)])
def test_min_p_is_transformers_own(sampling):
    logits = 2.0 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    scores = MinPLogitsWarper(sampling.min_p)(None, logits / sampling.temperature)  # pyright: ignore[reportArgumentType]
    law = torch.softmax(scores, -1)[0].numpy()
    target = target_rows(logits, make_call([1], 0, 1, sampling=sampling), cached_len=1)
    kept = np.flatnonzero(law)
    assert set(target.rows.token_ids.tolist()) <= set(kept.tolist())
    if sampling.top_p == 1.0 and not target.is_wide:
        np.testing.assert_array_equal(target.rows.token_ids, kept)
        np.testing.assert_allclose(target.rows.probs, law[kept], atol=1e-6)


def test_greedy_rows_are_the_best_after_processing():
    logits = torch.tensor([[5.0, 4.0, 3.0], [5.0, 4.0, 3.0]])
    call = make_call([1, 0], 1, 1, sampling=SamplingParams(0.0), processing=LogitProcessing(presence_penalty=1.5))
    # before the draft token 0 nothing has been generated; after it, 0 is penalised: 3.5, 4, 3
    assert target_rows(logits, call, cached_len=2, token_ids=np.array([1, 0])).rows.token_ids.tolist() == [0, 1]


def test_a_request_that_leaves_no_token_is_an_error_and_not_a_made_up_token():
    call = make_call([1], 0, 1, processing=LogitProcessing(allowed_token_ids=(2,)))
    logits = torch.zeros(1, 5)
    logits[0, 2] = -torch.inf  # the model itself forbids it
    with pytest.raises(InvalidRows, match="after the request's processing"):
        target_rows(logits, call, cached_len=1)


def test_penalties_without_the_tokens_are_refused():
    call = make_call([1, 2], 1, 1, processing=LogitProcessing(presence_penalty=1.0))
    with pytest.raises(InvalidRequest):
        target_rows(torch.zeros(2, 5), call, cached_len=2)
    with pytest.raises(InvalidRequest):
        target_rows(torch.zeros(2, 5), call, cached_len=2, token_ids=np.array([1]))


@pytest.mark.parametrize("sampling", [SamplingParams(0.0), SamplingParams(0.5, 5), SamplingParams(0.8)], ids=str)
def test_logprobs_are_the_log_softmax_of_the_raw_logits(sampling):
    rng = np.random.default_rng(3)
    tokens = [1, 2, 3, 4, 5]
    logits = 3.0 * rng.standard_normal((3, VOCAB)).astype(np.float32)
    call = make_call(
        tokens, 2, 2, sampling=sampling, processing=LogitProcessing(presence_penalty=2.0), num_logprobs=4
    )  # fmt: skip
    target = target_rows(torch.from_numpy(logits), call, cached_len=5, token_ids=np.array(tokens))
    expected = np.stack([log_softmax(row) for row in logits])
    got = target.logprobs
    assert got is not None and target.is_wide == (sampling.temperature == 0.8)
    np.testing.assert_array_equal(got.top_token_ids, np.argsort(-expected, axis=1)[:, :4])
    np.testing.assert_allclose(got.top, -np.sort(-expected, axis=1)[:, :4], atol=1e-5)
    np.testing.assert_allclose(got.draft, expected[[0, 1], [4, 5]], atol=1e-5)
    if target.is_wide:
        assert target.recovered_token_ids is not None and target.plain_token_ids is not None
        assert got.recovered is not None and got.plain is not None
        np.testing.assert_allclose(got.recovered, expected[[0, 1], target.recovered_token_ids], atol=1e-5)
        np.testing.assert_allclose(got.plain, expected[[0, 1, 2], target.plain_token_ids], atol=1e-5)
        assert got.entries is None
    else:
        assert got.entries is not None
        np.testing.assert_allclose(got.entries, expected[target.rows.row_index(), target.rows.token_ids], atol=1e-5)
        assert got.recovered is got.plain is None


def test_no_logprobs_unless_asked_for_and_never_more_than_there_are_tokens():
    call = make_call([1], 0, 1)
    assert target_rows(torch.zeros(1, 5), call, cached_len=1).logprobs is None
    for asked, given in ((0, 0), (20, 5)):
        target = target_rows(torch.zeros(1, 5), make_call([1], 0, 1, num_logprobs=asked), cached_len=1)
        assert target.logprobs is not None and target.logprobs.top.shape == (1, given)


def test_a_resolved_token_comes_from_the_processed_row_and_brings_its_raw_logprob():
    logits = torch.zeros(2, VOCAB)
    allowed = (7, 9, 11)
    call = make_call(
        [1, 7], 1, 1, processing=LogitProcessing(allowed_token_ids=allowed), hold_rows=True, num_logprobs=0
    )  # fmt: skip
    held = HeldRows(logits, call, np.array([1, 7], np.int32))
    for uniform, token in ((0.1, 9), (0.9, 11)):  # 7 is what was proposed
        resolved = held.resolve(ResolveCall("s", 0, 0, 0.5, uniform, SparseRows.one_hot([7])))
        assert resolved.token_id == token
        assert resolved.logprob == pytest.approx(-np.log(VOCAB), abs=1e-5)
    with pytest.raises(InvalidRequest, match="position"):
        held.resolve(ResolveCall("s", 0, 2, 0.5, 0.1, SparseRows.one_hot([7])))
