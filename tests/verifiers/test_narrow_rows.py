"""Rows of many sessions at once: the same law as call by call, and no row that depends on its neighbours."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdiff_dist.core.rows import SparseRows
from specdiff_dist.types import PrefixStatement, SamplingParams, VerifyCall
from specdiff_dist.verifiers.narrow_rows import can_be_narrow, narrow_rows
from specdiff_dist.verifiers.target_rows import target_rows

VOCAB = 700
COUNTS = [1, 3, 1, 5, 2]
SETTINGS = [
    SamplingParams(0.0),
    SamplingParams(1.0, 1),
    SamplingParams(0.7, 50, 0.95),
    SamplingParams(1.7, 256, 0.5),
    SamplingParams(0.4, 20),
    SamplingParams(1.0, 200, 1e-4),
    SamplingParams(0.9, 80, 0.9, 0.1),
]


def logits_of(seed: int) -> torch.Tensor:
    return 3.0 * torch.randn(sum(COUNTS), VOCAB, generator=torch.Generator().manual_seed(seed))


def one_by_one(logits: torch.Tensor, sampling: SamplingParams) -> SparseRows:
    prefix = PrefixStatement("s", 0, 0, 0, np.array([1], np.int32))
    call = VerifyCall(prefix, np.zeros(len(logits) - 1, np.int32), sampling, None, np.full(len(logits), 0.5))
    return target_rows(logits, call, cached_len=0).rows


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_the_law_is_that_of_a_call_by_itself(sampling: SamplingParams):
    assert can_be_narrow(sampling, VOCAB)
    logits = logits_of(1)
    for own, got in zip(logits.split(COUNTS), narrow_rows(logits, COUNTS, sampling), strict=True):
        expected = one_by_one(own, sampling)
        assert got is not None
        got.check(vocab_size=VOCAB)
        assert got.row_splits.tolist() == expected.row_splits.tolist()
        assert got.token_ids.tolist() == expected.token_ids.tolist()
        np.testing.assert_allclose(got.probs, expected.probs, rtol=1e-6)
        assert (got.row_splits.dtype, got.token_ids.dtype, got.probs.dtype) == (np.int64, np.int32, np.float32)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_a_row_is_the_same_to_the_last_bit_whatever_is_beside_it(sampling: SamplingParams):
    for seed in range(5):
        logits = logits_of(seed)
        together = narrow_rows(logits, COUNTS, sampling)
        for own, got in zip(logits.split(COUNTS), together, strict=True):
            (alone,) = narrow_rows(own.clone(), [len(own)], sampling)
            assert got is not None and alone is not None
            assert got.probs.tobytes() == alone.probs.tobytes()
            assert got.token_ids.tobytes() == alone.token_ids.tobytes()


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_broken_rows_are_left_to_their_own_call(sampling: SamplingParams, broken: float):
    logits = logits_of(2)
    logits[2, 5] = broken  # the second call's
    got = narrow_rows(logits, COUNTS, sampling)
    assert [rows is None for rows in got] == [False, True, False, False, False]


def test_ties_at_the_kth_logit_are_left_to_their_own_call():
    logits = logits_of(3)
    logits[0].fill_(0.0)
    got = narrow_rows(logits, COUNTS, SamplingParams(1.0, 20))
    assert [rows is None for rows in got] == [True, False, False, False, False]
    (greedy, *_) = narrow_rows(logits, COUNTS, SamplingParams(0.0))
    assert greedy is not None and greedy.token_ids.tolist() == [0]  # the first of equals


def test_equal_probabilities_are_kept_by_token_id():
    logits = torch.full((1, 30), -5.0)
    logits[0, [20, 7, 13]] = 1.0
    logits[0, 9] = 0.0
    (rows,) = narrow_rows(logits, [1], SamplingParams(1.0, 4, 0.5))
    assert rows is not None and rows.token_ids.tolist() == [7, 13]


def test_which_requests_it_is_for():
    assert can_be_narrow(SamplingParams(0.0), 2) and can_be_narrow(SamplingParams(1.0, 256), 1000)
    for wide in (SamplingParams(1.0), SamplingParams(1.0, 257), SamplingParams(1.0, 0, 0.9)):
        assert not can_be_narrow(wide, 1000)
    assert not can_be_narrow(SamplingParams(1.0, 5), 5)  # there is no next one to look for ties at
