from __future__ import annotations

import numpy as np
import pytest

from specdiff_dist.core.calibration import read_table
from specdiff_dist.train.calibrate import fit, isotonic
from specdiff_dist.train.evaluation import Outcomes, calibration_error, summarise


def outcomes_of(num_answers: int = 3000, *, seed: int = 0) -> Outcomes:
    """Overconfident: a token of confidence c is right with probability c²; four positions, six blocks an answer."""
    rng = np.random.default_rng(seed)
    shape = (num_answers * 6, 4)
    confidence = rng.random(shape).astype(np.float32)
    match = rng.random(shape) < confidence**2
    known = np.ones(shape, bool)
    known[::6, 2:] = False  # the answer ends
    reached = np.concatenate([known[:, :1], np.logical_and.accumulate(match, axis=1)[:, :-1]], axis=1) & known
    return Outcomes(
        np.repeat(np.arange(num_answers), 6), known, match & known, reached, match.astype(np.float32), confidence
    )


def test_fitting_mends_an_overconfident_drafter():
    found = fit(outcomes_of())
    assert found.ece_before > 0.12
    assert found.ece_after < 0.02 and found.ece_by_position[0] < 0.02
    assert found.table.shape == (4, 16) and np.all(np.diff(found.table, axis=1) >= 0)
    confidence = np.array([0.1, 0.5, 0.9])
    for value in confidence:
        np.testing.assert_allclose(read_table(np.array([value]), found.table), [value**2], atol=0.08)
    assert found.as_json()["kind"] == "isotonic"


def test_isotonic_pools_what_falls():
    np.testing.assert_allclose(isotonic(np.array([1.0, 3.0, 2.0, 5.0]), np.ones(4)), [1.0, 2.5, 2.5, 5.0])
    np.testing.assert_allclose(isotonic(np.array([4.0, 1.0]), np.array([1.0, 3.0])), [1.75, 1.75])
    values = np.random.default_rng(0).random(50)
    pooled = isotonic(values, np.ones(50))
    assert np.all(np.diff(pooled) >= 0)
    np.testing.assert_allclose(pooled.sum(), values.sum())


def test_calibration_error_is_the_gap_between_forecast_and_frequency():
    assert calibration_error(np.full(100, 0.9), np.arange(100) < 90) == pytest.approx(0.0)
    assert calibration_error(np.full(100, 0.9), np.arange(100) < 50) == pytest.approx(0.4)
    assert calibration_error(np.zeros(0), np.zeros(0, bool)) == 0.0


def test_the_summary_counts_known_positions_and_leading_matches():
    known = np.array([[1, 1, 1], [1, 1, 0]], bool)
    match = np.array([[1, 0, 1], [1, 1, 0]], bool)
    overlap = np.array([[0.5, 0.5, 1.0], [1.0, 0.5, 0.9]], np.float32)
    found = summarise(Outcomes(np.arange(2), known, match, known, overlap, overlap))
    assert found.match == [1.0, 0.5, 1.0]
    assert found.tv == [0.25, 0.5, 0.0]
    assert found.accepted_greedy == 1.5
    assert found.accepted_sampled == pytest.approx((0.5 + 0.25 + 0.25 + 1.0 + 0.5) / 2)
