"""The discrete-event simulation against arithmetic."""

from __future__ import annotations

from itertools import pairwise

import pytest

from specdiff_dist.core.throughput import LineFit
from specdiff_dist.errors import InvalidConfig
from specdiff_dist.simulate.cluster import BatchCost, Cluster, Load, simulate
from specdiff_dist.simulate.planning import assumed_rounds, batch_cost, recorded_rounds, recorded_rounds_per_s
from tests.simulate.rounds import made_round

DRAFT, VERIFY = BatchCost(2.0, 0.0, 0.25), BatchCost(10.0, 0.0, 1.0)


def cluster(routers=1, drafters=1, verifiers=1, **options) -> Cluster:
    options = {"router_s": 0.5, "wire_s": 0.125, **options}
    return Cluster(routers, drafters, verifiers, draft=DRAFT, verify=VERIFY, **options)


def test_one_session_by_arithmetic():
    """Three rounds of 4 tokens, 3 accepted: .5 router + 3 (draft) + 14 (verify) + 4 wires of 1/8, 4 tokens each; the
    last wire is the reply's."""
    outcome = simulate(cluster(), Load(1, 12, [(4, 3)]))
    assert (outcome.num_rounds, outcome.num_tokens) == (3, 12)
    assert outcome.makespan_s == pytest.approx(3 * (0.5 + 3.0 + 14.0 + 4 * 0.125))
    assert outcome.drafter_busy == pytest.approx(3 * 3.0 / outcome.makespan_s)
    assert outcome.verifier_busy == pytest.approx(3 * 14.0 / outcome.makespan_s)
    assert outcome.latency_s(0.99) == pytest.approx(outcome.makespan_s)


def test_plain_rounds_do_without_the_drafter():
    outcome = simulate(cluster(), Load(1, 5, [(0, 0)]))
    assert outcome.num_rounds == outcome.num_tokens == 5
    assert outcome.drafter_busy == 0.0
    assert outcome.makespan_s == pytest.approx(5 * (0.5 + 10.0 + 2 * 0.125))


def test_two_sessions_share_a_forward():
    """Both wait while the drafter serves the first; then they alternate. One verifier, batches of one: twice the work."""
    batched = simulate(cluster(router_s=0.0, wire_s=0.0), Load(2, 4, [(4, 3)]))
    serial = simulate(cluster(router_s=0.0, wire_s=0.0, max_batch=1), Load(2, 4, [(4, 3)]))
    # Batched: draft 1 at 0-3, draft 2 at 3-6, verify 1 at 3-17, verify 2 at 17-31: nobody waits together in one round.
    assert batched.makespan_s == pytest.approx(3.0 + 2 * 14.0)
    assert serial.makespan_s == pytest.approx(3.0 + 2 * 14.0)
    many = Load(16, 40, [(4, 3)])
    assert simulate(cluster(), many).makespan_s < 0.5 * simulate(cluster(max_batch=1), many).makespan_s


@pytest.mark.parametrize("arrivals", [None, 0.5])
def test_every_token_is_made_and_no_more(arrivals):
    outcome = simulate(cluster(2, 3, 2), Load(50, 33, [(4, 3), (4, 0), (0, 0), (2, 2)], arrivals), seed=3)
    assert outcome.num_tokens == 50 * 33
    assert len(outcome.latencies_s) == 50
    assert min(outcome.latencies_s) > 0
    assert 0 < outcome.drafter_busy <= 1
    assert 0 < outcome.verifier_busy <= 1


def test_the_same_seed_is_the_same_run():
    load = Load(30, 20, [(4, 3), (4, 0)], 1.0)
    assert simulate(cluster(2, 2, 2), load, seed=1) == simulate(cluster(2, 2, 2), load, seed=1)
    assert simulate(cluster(2, 2, 2), load, seed=1) != simulate(cluster(2, 2, 2), load, seed=2)


def test_more_replicas_are_never_slower():
    load = Load(200, 20, [(4, 2)])
    spans = [simulate(cluster(4, 2 * n, n), load).makespan_s for n in (1, 2, 4, 8)]
    assert all(later <= 1.02 * earlier for earlier, later in pairwise(spans))
    assert spans[-1] < 0.6 * spans[0]


def test_max_sessions_bounds_who_is_served():
    """Two verifiers for one session each: of six equal sessions, two run at a time."""
    load = Load(6, 4, [(4, 3)])
    alone = simulate(cluster(6, 6, 2, max_sessions=1, router_s=0.0), load)
    one = simulate(cluster(6, 6, 2, router_s=0.0), Load(1, 4, [(4, 3)])).makespan_s
    assert sorted(alone.latencies_s) == pytest.approx([one, one, 2 * one, 2 * one, 3 * one, 3 * one], rel=0.02)


def test_least_loaded_replicas_get_the_next_session():
    outcome = simulate(cluster(4, 4, 4, router_s=0.0), Load(4, 4, [(4, 3)]))
    assert outcome.makespan_s == pytest.approx(3.0 + 14.0 + 4 * 0.125)  # nobody waited for anybody


@pytest.mark.parametrize(
    "wrong", [{"routers": 0}, {"drafters": 0}, {"verifiers": 0}, {"max_batch": 0}, {"max_sessions": 0}]
)
def test_a_cluster_of_nothing_is_refused(wrong):
    with pytest.raises(InvalidConfig):
        cluster(**wrong)


@pytest.mark.parametrize("wrong", [(0, 1, [(1, 1)]), (1, 0, [(1, 1)]), (1, 1, [])])
def test_an_empty_load_is_refused(wrong):
    with pytest.raises(InvalidConfig):
        Load(*wrong)


def test_assumed_rounds_have_the_law_of_independent_acceptance():
    rounds = assumed_rounds(3, 0.5)
    share = [sum(accepted == j for _, accepted in rounds) / len(rounds) for j in range(4)]
    assert share == pytest.approx([0.5, 0.25, 0.125, 0.125], abs=2e-3)
    assert assumed_rounds(2, 0.0)[0] == (2, 0)
    assert assumed_rounds(2, 1.0)[-1] == (2, 2)


def test_a_trace_becomes_a_cluster():
    cost = batch_cost(LineFit(2.0, 0.25))
    assert cost(3, 12) == 2.0 + 12 * 0.25
    requests = [
        [made_round([0.5, 0.5], num_accepted=1, wall_s=99.0), made_round([], wall_s=2.0), made_round([0.5], wall_s=3.0)]
    ]
    assert recorded_rounds(requests) == [(2, 1), (0, 0), (1, 0)]
    assert recorded_rounds_per_s(requests) == pytest.approx(2 / 5.0)  # without the prompt's round
