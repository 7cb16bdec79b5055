"""Replay: rounds made by hand, with answers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdiff_dist.core.libraspec import oracle_length
from specdiff_dist.core.speculation import Additive, FailFast, LibraSpec, MeasuredLibraSpec, Off, Static
from specdiff_dist.core.throughput import LineFit
from specdiff_dist.errors import InvalidConfig, InvalidRequest
from specdiff_dist.simulate.comparison import compare_all, longest, parse_policy
from specdiff_dist.simulate.costs import Costs, fit_costs, router_s
from specdiff_dist.simulate.replay import oracle, replay
from tests.simulate.rounds import COSTS, made_round

GOOD = made_round([1.0, 1.0, 1.0, 1.0])
TWO = made_round([1.0, 1.0, 0.0, 1.0])
BAD = made_round([0.0, 1.0, 1.0, 1.0])


@pytest.mark.parametrize(("one", "length"), [(GOOD, 4), (TWO, 2), (BAD, 1)])
def test_the_oracle_by_hand(one, length):
    """E(d)/(10 + d): 5/14 is the best of GOOD, 3/12 of TWO; BAD yields one token whatever is verified."""
    assert oracle(one, COSTS) == length


def test_leniency_moves_the_oracle():
    assert oracle(BAD, COSTS, leniency=1.0) == 4


@settings(max_examples=300)
@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=10),
    st.floats(0.1, 50.0),
    st.floats(0.0, 5.0),
)
def test_the_oracle_is_the_exhaustive_argmax(target, base, slope):
    costs = Costs(LineFit(1.0, 0.0), LineFit(base, slope))
    chosen = oracle(made_round(target), costs)
    rates = []
    for d in range(1, len(target) + 1):
        expected, survive = 1.0, 1.0
        for probability in target[:d]:
            survive *= probability
            expected += survive
        rates.append(expected / (base + slope * d))
    assert rates[chosen - 1] == pytest.approx(max(rates), rel=1e-12)
    assert rates[chosen - 1] >= oracle_length(np.array(target), base, slope)[1] - 1e-12


def test_a_static_replay_by_hand():
    """Length 3 on GOOD, TWO, BAD: oracles 4, 2, 1; 4 + 3 + 1 tokens in three rounds of 1 + 13 seconds."""
    result = replay(Static(3), [[GOOD, TWO], [BAD]], COSTS)

    assert result.lengths == (3, 3, 3)
    assert result.oracle_lengths == (4, 2, 1)
    assert result.mean_abs_deviation == pytest.approx(4 / 3)
    assert (result.tokens, result.seconds) == (8, 42.0)
    assert result.expected_speedup == pytest.approx(8 * 10 / 42)


def test_off_is_exactly_as_fast_as_plain_decoding():
    result = replay(Off(), [[GOOD, TWO, BAD]], COSTS)
    assert result.lengths == (0, 0, 0)
    assert result.expected_speedup == 1.0


def test_the_rounds_own_numbers_decide():
    one = made_round([0.6, 0.6], uniforms=[0.59, 0.61])
    assert replay(Static(2), [[one]], COSTS).tokens == 2  # first accepted, second not, one recovered
    assert replay(Static(2), [[one]], COSTS, leniency=0.1).tokens == 3  # .9·.6 + .1 = .64


def test_additive_grows_by_two_and_shrinks_by_one():
    """2 → all accepted → 4 → cut at the recorded 4, all accepted → limit 4 → rejected → 3."""
    result = replay(Additive(2, 4), [[GOOD, GOOD, BAD, GOOD]], COSTS)
    assert result.lengths == (2, 4, 4, 3)


def test_a_new_request_starts_anew_but_shares_what_was_learned():
    assert replay(Additive(2, 4), [[GOOD], [GOOD]], COSTS).lengths == (2, 2)


def test_failfast_stops_at_the_first_doubt_and_pays_for_its_calls():
    sure = made_round([1.0] * 6, confidence=[0.9] * 6)
    unsure = made_round([1.0] * 6, confidence=[0.9, 0.1, 0.9, 0.9, 0.9, 0.9])
    result = replay(FailFast(0.5, 2, 6), [[sure, unsure]], COSTS)
    assert result.lengths == (6, 2)
    assert result.seconds == (3 * 1.0 + 16.0) + (1.0 + 12.0)


def test_libraspec_replays_its_worked_example():
    q = [0.95, 0.9, 0.3, 0.6, 0.9, 0.9, 0.9, 0.9]
    result = replay(LibraSpec(2.0, 8, 8), [[made_round([1.0] * 8, confidence=q)]], COSTS)
    assert result.lengths == (8,)  # max_length reached by the first block
    q12 = [*q, 0.9, 0.9, 0.9, 0.9]
    result = replay(LibraSpec(2.0, 8, 12), [[made_round([1.0] * 12, confidence=q12)]], COSTS)
    assert result.lengths == (5,)


def test_measured_libraspec_learns_to_stop_when_nothing_is_accepted():
    result = replay(MeasuredLibraSpec(2, 4), [[BAD] * 40], COSTS)
    assert result.lengths[0] == 2
    assert sum(length == 0 for length in result.lengths[20:]) >= 18


def test_a_trace_without_drafts_is_refused():
    with pytest.raises(InvalidConfig, match="no drafted round"):
        replay(Static(3), [[made_round([])]], COSTS)
    with pytest.raises(InvalidConfig, match="no drafted round"):
        longest([[made_round([])], []])


def test_the_best_static_length_is_found_by_search():
    requests = [[GOOD] * 8 + [BAD] * 2]
    compared = compare_all(requests, COSTS, block=2)
    speedups = {d: replay(Static(d), requests, COSTS).expected_speedup for d in range(1, 5)}
    assert compared.best_static_length == max(speedups, key=lambda d: speedups[d]) == 4
    assert compared.replays.keys() == {"static", "additive", "failfast", "libraspec", "libraspec_measured"}
    assert compared.closest_static_deviation == pytest.approx(0.6)  # length 4: 0 on GOOD, 3 on BAD


def test_policies_by_name():
    assert parse_policy('static:{"length": 7}') == ("static", Static(7))
    assert parse_policy("libraspec") == ("libraspec", LibraSpec())
    for wrong in ("best", "static:7", "static:{", 'static:{"size": 7}', 'additive:{"start": 0}'):
        with pytest.raises((InvalidConfig, InvalidRequest)):
            parse_policy(wrong)


def test_costs_are_told_from_the_rounds():
    rounds = [
        made_round([0.5] * d, num_calls=calls, draft_s=calls * (2.0 + 0.5 * d / calls) if calls else 0.0, verify_s=10.0 + 3.0 * d)
        for d, calls in ((0, 0), (2, 1), (4, 1), (8, 2), (6, 1))
    ]  # fmt: skip
    costs = fit_costs([[made_round([0.5], draft_s=99.0, verify_s=99.0), *rounds]])  # the first carries the prompt
    assert (costs.draft.intercept, costs.draft.slope) == (pytest.approx(2.0), pytest.approx(0.5))
    assert (costs.verify.intercept, costs.verify.slope) == (pytest.approx(10.0), pytest.approx(3.0))
    assert costs.round_s(8, 2, 6) == pytest.approx(2 * 2.0 + 8 * 0.5 + 10.0 + 6 * 3.0)


def test_costs_of_one_length_cannot_be_told():
    with pytest.raises(InvalidConfig, match="--costs-from"):
        fit_costs([[GOOD, GOOD, GOOD]])


def test_router_seconds_are_what_is_left():
    assert router_s([[GOOD, made_round([0.5], draft_s=1.0, verify_s=2.0, wall_s=3.25)]]) == pytest.approx(0.25)
