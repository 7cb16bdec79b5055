from __future__ import annotations

import numpy as np
import pytest

from specdiff_dist.core.costs import MIN_ASKED, AskedRounds, MeasuredCosts, SharedCost, SharedForward
from specdiff_dist.core.speculation import (
    PROBE_AT_LEAST_EVERY,
    PROBE_EVERY,
    TELL_EVERY,
    DraftStatistics,
    Knowledge,
    MeasuredLibraSpec,
    Static,
    learn,
    plan,
)

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
    assert cost(num_tokens) == pytest.approx(expected, rel=1e-3)


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
    draft.forward, draft.rest = SharedCost().forward, SharedCost().rest
    for _ in range(300):
        draft.observe(8, 0.002 * num_sharers, SharedForward(0.002 * num_sharers, 8 * num_sharers, num_sharers))
    knowledge = Knowledge(costs=MeasuredCosts(draft, verification))
    rng = np.random.default_rng(1)
    for _ in range(2000):
        run = int(np.argmin(np.append(rng.random(8) < acceptance, False)))
        knowledge.calibration.observe(np.full(8, 0.6), 8, run)
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


def test_rounds_that_asked_are_judged_by_what_they_came_to():
    asked = AskedRounds()
    assert asked.pays(0.010) is None
    for _ in range(2 * int(MIN_ASKED)):
        asked.observe(2, 0.015)
    assert asked.pays(0.010) is True  # 2 tokens in the time of 1.5 plain rounds
    assert asked.pays(0.007) is False


@pytest.mark.parametrize(("share_answered", "asks"), [(1.0, True), (0.2, False)])
def test_a_drafter_that_mostly_has_nothing_is_not_asked(share_answered, asks):
    """Of what is verified 90 % are accepted; but each ask costs half a plain round."""
    policy, knowledge, rng = MeasuredLibraSpec(2, 2), Knowledge(), np.random.default_rng(0)
    nothing, good = np.zeros(0), np.full(2, 0.9)
    num_asks = []
    for _ in range(2000):
        steps, statistics, num_verified = plan(policy, knowledge), DraftStatistics(nothing, nothing, nothing), 0
        has_asked = False
        try:
            next(steps)
            has_asked = True
            if rng.random() < share_answered:
                statistics = DraftStatistics(good, good, good)
            steps.send(statistics)
        except StopIteration as decided:
            num_verified = min(decided.value, len(statistics))
        num_accepted = int(np.argmin(np.append(rng.random(num_verified) < 0.9, False)))
        draft_s = 0.5 * forward_s(1) if has_asked else None
        learn(policy, knowledge, statistics, num_verified, num_accepted, draft_s=draft_s)
        knowledge.costs.observe(len(statistics), draft_s or 0.0, num_verified, forward_s(1 + num_verified))
        num_asks.append(has_asked)
    assert np.mean(num_asks[500:]) > 0.95 if asks else np.mean(num_asks[500:]) < 0.1


def test_while_drafting_has_long_not_paid_most_sessions_do_not_know_of_the_drafter():
    policy, knowledge = MeasuredLibraSpec(), Knowledge()
    assert all(knowledge.tells_drafter(policy) for _ in range(20))
    knowledge.plain_rounds.period = PROBE_AT_LEAST_EVERY
    assert sum(knowledge.for_session().tells_drafter(policy) for _ in range(10 * TELL_EVERY)) == 10
    assert all(knowledge.tells_drafter(Static(2)) for _ in range(20))
    knowledge.plain_rounds.period = PROBE_EVERY  # a look has found that it pays
    assert knowledge.tells_drafter(policy)
