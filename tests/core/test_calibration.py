from __future__ import annotations

import math

import numpy as np
import pytest

from specdiff_dist.core.calibration import CENTRES, NUM_BINS, AcceptanceCalibration, read_table
from specdiff_dist.errors import InvalidConfig


def test_before_any_round_a_confidence_is_taken_as_it_is():
    confidences = np.array([0.9, 0.2, 0.55])
    np.testing.assert_allclose(AcceptanceCalibration().estimate(confidences), confidences)


def test_a_prior_of_the_drafter_is_where_estimates_start():
    centres = (np.arange(NUM_BINS) + 0.5) / NUM_BINS
    prior = np.stack([centres**2, 0.5 * centres])
    calibration = AcceptanceCalibration(tuple(map(tuple, prior.tolist())))
    found = calibration.estimate(np.array([centres[14], centres[8], centres[3]]))
    np.testing.assert_allclose(found, [centres[14] ** 2, 0.5 * centres[8], 0.5 * centres[3]])
    between = (centres[4] + centres[5]) / 2
    np.testing.assert_allclose(calibration.estimate(np.array([between])), [(centres[4] ** 2 + centres[5] ** 2) / 2])
    assert calibration.estimate(np.array([1.0]))[0] == prior[0, -1]


def test_rounds_outweigh_the_prior():
    calibration = AcceptanceCalibration(((0.1,) * NUM_BINS,))
    for _ in range(200):
        calibration.observe(np.array([0.7]), 1, 1)
    assert calibration.estimate(np.array([0.7]))[0] > 0.95


@pytest.mark.parametrize(
    "table",
    [
        ((0.1,) * (NUM_BINS - 1),),
        ((0.1,) * (NUM_BINS - 1) + (1.5,),),
        ((0.2, 0.1) + (0.9,) * (NUM_BINS - 2),),
        ((math.nan,) * NUM_BINS,),
        ((0.1,) * NUM_BINS, (0.1,)),
        ((0.1,) * NUM_BINS,) * 65,
    ],
)
def test_what_is_no_table_is_refused(table):
    with pytest.raises(InvalidConfig, match="calibration table"):
        AcceptanceCalibration(table)


def test_positions_beyond_a_table_take_its_last_row():
    table = np.stack([np.full(NUM_BINS, 0.25), np.full(NUM_BINS, 0.75)])
    np.testing.assert_allclose(read_table(np.array([0.5, 0.5, 0.5, 0.5]), table), [0.25, 0.75, 0.75, 0.75])


def test_a_table_is_read_by_straight_lines_between_the_centres():
    rng = np.random.default_rng(0)
    table = np.sort(rng.random((40, NUM_BINS)), axis=1)
    confidences = np.concatenate([[0.0, 1.0, 1.5 / NUM_BINS], rng.random(37)])
    expected = [np.interp(value, CENTRES, row) for value, row in zip(confidences, table, strict=True)]
    np.testing.assert_allclose(read_table(confidences, table), expected, rtol=1e-12)
