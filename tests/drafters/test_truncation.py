from __future__ import annotations

import numpy as np

from specdiff_dist.drafters.truncation import truncated_rows
from specdiff_dist.types import SamplingParams
from tests.doubles import processed_probs

RNG = np.random.default_rng(0)


def candidates(logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    return order, np.take_along_axis(logits, order, axis=1)


def test_all_candidates_give_the_rows_of_the_plainest_code():
    logits = (2.0 * RNG.standard_normal((5, 30))).astype(np.float32)
    ids, values = candidates(logits, 30)
    for sampling in (
        SamplingParams(1.0), SamplingParams(0.4), SamplingParams(1.5, 4), SamplingParams(0.8, 0, 0.7),
        SamplingParams(1.2, 6, 0.5), SamplingParams(1.0, 1), SamplingParams(0.0),
    ):  # fmt: skip
        rows = truncated_rows(ids, values, sampling)
        rows.check(vocab_size=30)
        for index in range(5):
            expected = processed_probs(logits[index], sampling)
            got = np.zeros(30, np.float32)
            got[rows.row(index)[0]] = rows.row(index)[1]
            np.testing.assert_allclose(got, expected, atol=1e-6)
            np.testing.assert_array_equal(got > 0, expected > 0)


def test_only_the_candidates_have_probability():
    logits = RNG.standard_normal((3, 30)).astype(np.float32)
    ids, values = candidates(logits, 5)
    rows = truncated_rows(ids, values, SamplingParams(1.0))
    assert np.diff(rows.row_splits).tolist() == [5, 5, 5]
    np.testing.assert_allclose(rows.row_sums(), 1.0, rtol=1e-6)
    assert sorted(rows.row(0)[0].tolist()) == sorted(ids[0].tolist())


def test_extreme_temperatures_stay_finite():
    logits = np.array([[60.0, 0.0, -60.0]], np.float32)
    ids = np.array([[5, 2, 9]])
    assert truncated_rows(ids, logits, SamplingParams(1e-4)).token_ids.tolist() == [5]
    hot = truncated_rows(ids, logits, SamplingParams(100.0))
    assert hot.token_ids.tolist() == [2, 5, 9]
    assert truncated_rows(ids, logits, SamplingParams(100.0, 0, 1e-9)).token_ids.tolist() == [5]
