from __future__ import annotations

import numpy as np
import pytest

from specdiff_dist.core.costs import MeasuredCosts, OnlineCurve, OnlinePlane, SharedCost, SharedForward
from specdiff_dist.core.speculation import DraftStatistics, Knowledge, MeasuredLibraSpec, asks_drafter, plan

BASE_S, PER_TOKEN_S = 0.030, 0.002  # of a forward


def forward_s(num_tokens: float) -> float:
    return BASE_S + PER_TOKEN_S * num_tokens


def observed(num_sharers: int, *, rest_s: float = 0.0) -> SharedCost:
    cost, rng = SharedCost(), np.random.default_rng(0)
    for _ in range(300):
        tokens = rng.integers(1, 17, num_sharers)
        seconds = forward_s(tokens.sum())
        cost.observe(int(tokens[0]), seconds + rest_s, SharedForward(seconds, int(tokens.sum()), num_sharers))
    return cost


@pytest.mark.parametrize("num_tokens", [1, 5, 17])
@pytest.mark.parametrize("num_sharers", [1, 8, 64])
def test_a_call_is_charged_its_share(num_sharers, num_tokens):
    cost = observed(num_sharers, rest_s=0.004)
    expected = (0.004 + forward_s(num_sharers * num_tokens)) / num_sharers
    assert cost(num_tokens) == pytest.approx(expected, rel=6e-3)


def test_waiting_for_the_forwards_of_others_is_not_the_calls_own_cost():
    idle, queueing = SharedCost(), SharedCost()
    for _ in range(300):
        shared = forward_s(16)
        idle.observe(1, shared + 0.004, SharedForward(shared, 16, 16))
        queueing.observe(1, shared + 0.004 + 0.1, SharedForward(shared, 16, 16, queue_s=0.1))
    assert queueing(1) == pytest.approx(idle(1), rel=1e-9)


def test_a_replica_that_tells_nothing_is_charged_by_the_clock():
    cost = SharedCost()
    for _ in range(100):
        for tokens in (1, 4, 9):
            cost.observe(tokens, forward_s(tokens), None)
    assert cost(6) == pytest.approx(forward_s(6), rel=1e-3)


def lengths(num_sharers: int, *, acceptance: float) -> int:
    """What the measured policy submits when every call shares its forward with so many alike."""
    draft, verification = observed(num_sharers), observed(num_sharers)
    draft = SharedCost()
    draft.sharers = verification.sharers
    for _ in range(300):
        draft.observe(8, 0.002 * num_sharers, SharedForward(0.002 * num_sharers, 8 * num_sharers, num_sharers))
    knowledge = Knowledge(costs=MeasuredCosts(draft, verification))
    rng = np.random.default_rng(1)
    for _ in range(2000):
        run = int(np.argmin(np.append(rng.random(8) < acceptance, False)))
        knowledge.calibration.observe(np.full(8, 0.6), 8, run)
    if not asks_drafter(MeasuredLibraSpec(8, 8), knowledge):
        return 0
    steps = plan(MeasuredLibraSpec(8, 8), knowledge)
    try:
        next(steps)
        values = np.full(8, 0.6)
        steps.send(DraftStatistics(values, values, values))
    except StopIteration as decided:
        return decided.value
    raise AssertionError("it wanted more than a block")


def test_what_pays_alone_is_given_up_in_a_crowd():
    """Alone a further token lengthens a round by 6 %; among 64 it costs nearly as much as a plain token."""
    assert lengths(1, acceptance=0.6) >= 3
    assert lengths(8, acceptance=0.6) <= lengths(1, acceptance=0.6)
    assert lengths(64, acceptance=0.6) == 0
    assert lengths(8, acceptance=0.9) > 0  # good drafts still pay while the forward's base is worth sharing


def stairs_s(num_tokens: float) -> float:
    """As our kernels on a CPU: two rows cost as much as one, and three more than both."""
    return 0.004 * ((num_tokens + 1) // 2) + 0.001


def test_what_a_call_and_what_a_token_costs_are_told_apart():
    plane, rng = OnlinePlane(), np.random.default_rng(0)
    for _ in range(500):
        calls = int(rng.integers(2, 9))
        tokens = int(rng.integers(1, 4, calls).sum())
        plane.observe(tokens, calls, (0.004 + 0.001 * tokens + 0.0005 * calls) * rng.normal(1.0, 0.1))
    assert plane(8, 8) == pytest.approx(0.016, rel=0.1)
    assert plane(24, 8) - plane(8, 8) == pytest.approx(0.016, rel=0.2)


def test_before_anybody_has_drafted_in_a_crowd_a_further_token_is_as_dear_as_a_plain_one():
    plane, rng = OnlinePlane(), np.random.default_rng(0)
    for calls in rng.integers(2, 9, 300).tolist():
        plane.observe(calls, calls, 0.004 + 0.0016 * calls)
    assert plane(8, 8) == pytest.approx(0.004 + 0.0016 * 8, rel=0.03)
    assert plane(16, 8) - plane(8, 8) > 0.85 * 8 * 0.0016


def test_nothing_is_cheaper_than_nothing():
    plane, rng = OnlinePlane(), np.random.default_rng(1)
    for _ in range(50):
        plane.observe(int(rng.integers(2, 9)), int(rng.integers(2, 9)), 0.01 * rng.random())
        assert min(plane._solve()) >= 0.0


def test_pieces_of_prompts_in_a_forward_say_nothing_of_what_drafts_cost():
    cost = SharedCost()
    for _ in range(100):
        cost.observe(1, 0.016, SharedForward(0.016, 8, 8))
        cost.observe(1, 0.300, SharedForward(0.300, 264, 9))
    assert cost(1) < 0.004


def test_costs_that_go_in_steps_are_learned_as_steps():
    curve, rng = OnlineCurve(), np.random.default_rng(3)
    for size in rng.choice([1, 2, 3, 5], 600).tolist():
        curve.observe(size, stairs_s(size) * rng.normal(1.0, 0.1))
    assert curve(2) == pytest.approx(curve(1), rel=0.06)
    for size in (1, 2, 3, 5):
        assert curve(size) == pytest.approx(stairs_s(size), rel=0.06)
    assert curve(3) < curve(4) < curve(5)  # never seen: between its neighbours
    assert curve(9) > 1.5 * curve(5)  # beyond all seen: on with the slope


def test_a_slower_machine_is_slower_at_sizes_not_seen_since():
    curve = OnlineCurve()
    for _ in range(100):
        for size in (1, 9):
            curve.observe(size, forward_s(size))
    for _ in range(100):
        curve.observe(1, 2.0 * forward_s(1))
    assert curve(1) == pytest.approx(2.0 * forward_s(1), rel=0.05)
    assert curve(9) == pytest.approx(2.0 * forward_s(9), rel=0.15)


def test_one_bad_moment_is_not_believed_for_ever():
    curve = OnlineCurve()
    for _ in range(50):
        curve.observe(1, 0.005)
    curve.observe(3, 0.5)  # the machine was away
    for _ in range(3000):
        curve.observe(1, 0.005)
    assert curve(3) < 0.05


def test_many_sizes_are_remembered_in_few_means():
    curve = OnlineCurve()
    for size in np.random.default_rng(0).integers(1, 2000, 4000).tolist():
        curve.observe(size, forward_s(size))
    assert len(curve._sizes) < 50
    for size in (100, 700, 1500):
        assert curve(size) == pytest.approx(forward_s(size), rel=0.05)
