"""`bench model`: the fit and the comparison on rounds whose law is known, and over tables."""

from __future__ import annotations

import numpy as np
import pytest

from specdiff_dist.bench.model import Settings, evaluate, measure_model, num_requests
from specdiff_dist.errors import InvalidConfig
from specdiff_dist.simulate.trace import RoundTrace
from tests.byte_model import make_pair
from tests.simulate.rounds import made_round

SETTINGS = Settings(efforts=(1, 2), leniencies=(0.0, 0.5), block=2, max_tokens=12)
DISTANCE = {1: 0.5, 2: 0.2}


def ideal(steps: int, leniency: float) -> list[RoundTrace]:
    """Rounds that follow the model to the letter: acceptance ᾱ at both positions, 10 ms + 5 ms·K to draft, 20 ms + 1 ms·d
    to verify, 2 ms beside."""
    rng = np.random.default_rng([steps, int(10 * leniency)])
    acceptance = 1 - (1 - leniency) * DISTANCE[steps]
    rounds = []
    for _ in range(4000):
        accepted = int(np.argmin(np.append(rng.random(2) < acceptance, False)))
        draft_s = 0.010 + 0.005 * steps
        rounds.append(
            made_round(
                [1 - DISTANCE[steps]] * 2, num_accepted=accepted, draft_s=draft_s, verify_s=0.022,
                wall_s=draft_s + 0.024,
            )
        )  # fmt: skip
    return rounds


@pytest.fixture(scope="module")
def bench():
    rounds = {(steps, leniency): ideal(steps, leniency) for steps in (1, 2) for leniency in (0.0, 0.5)}
    plain = [made_round([], verify_s=0.02, wall_s=0.022)] * 50
    return evaluate(rounds, plain, SETTINGS)


def test_the_constants_are_found_again(bench):
    assert bench.model.mean_distance == pytest.approx(DISTANCE)
    assert (bench.model.draft_cost.intercept, bench.model.draft_cost.slope) == pytest.approx((0.010, 0.005))
    assert (bench.model.verify_cost.intercept, bench.model.verify_cost.slope) == pytest.approx((0.022, 0.001))


def test_a_pair_that_follows_the_model_is_predicted(bench):
    assert bench.median_relative_error < 0.02
    for cell in bench.cells:
        assert cell.acceptance == pytest.approx(cell.predicted_acceptance)
        assert cell.tokens_per_round == pytest.approx(cell.predicted_tokens_per_round, rel=0.03)


def test_the_median_is_over_cells(bench):
    assert bench.median_relative_error == pytest.approx(np.median([cell.relative_error for cell in bench.cells]))
    assert len(bench.cells) == 4


def test_it_runs_on_a_pair(tmp_path):
    calls = []
    with make_pair(tmp_path) as pair:
        bench = measure_model(pair, ["one", "two"], SETTINGS, progress=lambda: calls.append(1))
    assert len(calls) == num_requests(2, SETTINGS)
    assert {(cell.num_steps, cell.leniency) for cell in bench.cells} == {(1, 0.0), (1, 0.5), (2, 0.0), (2, 0.5)}
    assert all(cell.num_rounds > 0 and cell.tokens_per_s > 0 for cell in bench.cells)
    assert all(0 < cell.predicted_acceptance <= 1 for cell in bench.cells)


@pytest.mark.parametrize("wrong", [{"efforts": (1,)}, {"leniencies": (0.5,)}, {"max_tokens": 9, "block": 4}])
def test_settings_that_cannot_be_fitted_are_refused(wrong):
    with pytest.raises(InvalidConfig):
        Settings(**wrong)


def test_rounds_of_full_length_are_needed():
    rounds = {(steps, 0.0): [made_round([0.5])] for steps in (1, 2)}
    with pytest.raises(InvalidConfig, match="full length"):
        evaluate(rounds, [], SETTINGS)
