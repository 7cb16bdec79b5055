"""The throughput model against its equations worked out by hand."""

from __future__ import annotations

import pytest

from specdiff_dist.core.throughput import LineFit, ThroughputModel, mean_distance
from specdiff_dist.errors import InvalidConfig

MODEL = ThroughputModel(LineFit(0.010, 0.005), LineFit(0.030, 0.001), {1: 0.5, 4: 0.2})


def test_proposition_1():
    assert MODEL.acceptance(1, 0.0) == pytest.approx(0.5)
    assert MODEL.acceptance(1, 0.4) == pytest.approx(1 - 0.6 * 0.5)
    assert MODEL.acceptance(4, 1.0) == 1.0


def test_equation_6():
    """ᾱ = .5, B = 3: 1 + .5 + .25 + .125; ᾱ = 1: B + 1."""
    assert MODEL.tokens_per_round(1, 0.0, 3) == pytest.approx(1.875)
    assert MODEL.tokens_per_round(1, 1.0, 3) == pytest.approx(4.0)
    assert MODEL.tokens_per_round(1, 0.0, 0) == 1.0


def test_equation_7():
    """K = 4, B = 2, λ = .5: ᾱ = .9, E = 2.71, round .010 + .020 + .030 + .002."""
    assert MODEL.round_s(4, 2) == pytest.approx(0.062)
    assert MODEL.tokens_per_s(4, 0.5, 2) == pytest.approx(2.71 / 0.062)
    assert MODEL.agreement(4, 0.5) == pytest.approx(0.9)


def test_a_line_is_found_again():
    line = LineFit.of([1, 2, 4, 4], [3.0, 5.0, 9.0, 9.0])
    assert (line.intercept, line.slope) == (pytest.approx(1.0), pytest.approx(2.0))
    assert line(10) == pytest.approx(21.0)


def test_a_line_through_one_size_is_refused():
    with pytest.raises(InvalidConfig, match="two different sizes"):
        LineFit.of([4, 4, 4], [1.0, 2.0, 3.0])


def test_the_mean_distance_counts_reached_positions():
    assert mean_distance([0.9, 0.5, 0.1], [1, 1, 0], 0.0) == pytest.approx(0.3)
    assert mean_distance([0.9, 0.5], [1, 1], 0.5) == pytest.approx(0.6)  # (1-λ)d = .3
    for wrong in (([0.9], [1], 1.0), ([0.9], [0], 0.0)):
        with pytest.raises(InvalidConfig):
            mean_distance(*wrong)
