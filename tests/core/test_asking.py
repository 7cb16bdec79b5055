"""Whether drafting pays: judged by what rounds came to, with doubt, and looked at again."""

from __future__ import annotations

import numpy as np
import pytest

from specdiff_dist.core.asking import MIN_ASKED, PROBE_AT_LEAST_EVERY, PROBE_EVERY, TELL_EVERY, AskedRounds
from specdiff_dist.core.costs import SharedForward
from specdiff_dist.core.speculation import (
    DraftStatistics,
    Knowledge,
    MeasuredLibraSpec,
    Static,
    asks_copying,
    asks_drafter,
    learn,
    plan,
)


def forward_s(num_tokens: float) -> float:
    return 0.030 + 0.002 * num_tokens


def test_rounds_that_asked_are_judged_by_what_they_came_to():
    asked = AskedRounds()
    assert asked.pays(0.010) is None
    for _ in range(2 * int(MIN_ASKED)):
        asked.observe(2, 0.015)
    assert asked.pays(0.010) is True  # 2 tokens in the time of 1.5 plain rounds
    assert asked.pays(0.007) is False


@pytest.mark.parametrize("gain", [1.10, 0.85])
def test_chance_does_not_decide(gain):
    """One round in four brings three tokens more: a gain of 10 % is far less than the scatter of twenty rounds."""
    plain_s, num_wrong = 0.010, 0
    for seed in range(50):
        asked, rng = AskedRounds(), np.random.default_rng(seed)
        for _ in range(400):
            asked.observe(1 + 3 * (rng.random() < 0.25), 1.75 * plain_s / gain)
            asked.pays(plain_s)
        num_wrong += asked.is_paying != (gain > 1.0)
    assert num_wrong <= 6


def test_giving_up_is_not_undone_by_a_doubt():
    asked = AskedRounds()
    for tokens in (1, 3) * 50:
        asked.observe(tokens, 0.030)
    assert asked.pays(0.010) is False
    assert (
        asked.pays(0.0149) is False
    )  # as good as needed but for a doubt: only what is better than plain brings it back
    assert asked.pays(0.0160) is True
    assert asked.pays(0.0149) is True  # and now the doubt is in its favour


@pytest.mark.parametrize(("share_answered", "asks"), [(1.0, True), (0.2, False)])
def test_a_drafter_that_mostly_has_nothing_is_not_asked(share_answered, asks):
    """Of what is verified 90 % are accepted; but each ask costs half a plain round."""
    policy, knowledge, rng = MeasuredLibraSpec(2, 2), Knowledge(), np.random.default_rng(0)
    nothing, good = np.zeros(0), np.full(2, 0.9)
    num_asks = []
    for _ in range(2000):
        steps, statistics, num_verified = plan(policy, knowledge), DraftStatistics(nothing, nothing, nothing), 0
        has_asked = asks_drafter(policy, knowledge)
        try:
            if not has_asked:
                raise StopIteration(0)
            next(steps)
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
    knowledge.drafter.at(1.0).period = PROBE_AT_LEAST_EVERY
    assert sum(knowledge.for_session().tells_drafter(policy) for _ in range(10 * TELL_EVERY)) == 10
    assert all(knowledge.tells_drafter(Static(2)) for _ in range(20))
    knowledge.drafter.at(1.0).period = PROBE_EVERY  # a look has found that it pays
    assert knowledge.tells_drafter(policy)


def test_copying_and_the_drafter_are_judged_apart():
    """Copies bring two tokens for nothing, the drafter one for half a round: the one goes on, the other is given up."""
    policy, knowledge = MeasuredLibraSpec(2, 2), Knowledge()
    half, asked = np.full(2, 0.5), {True: 0, False: 0}
    for index in range(1000):
        is_local = index % 2 == 0
        if asks_copying(policy, knowledge) if is_local else asks_drafter(policy, knowledge):
            asked[is_local] += index >= 500
            statistics, num_accepted = DraftStatistics(half, half, half, is_local), 2 if is_local else 0
            draft_s = 1e-4 if is_local else 0.5 * forward_s(1)
            learn(policy, knowledge, statistics, 2, num_accepted, draft_s=draft_s)
            knowledge.costs.observe(0 if is_local else 2, draft_s, 2, forward_s(3))
        else:
            learn(policy, knowledge, DraftStatistics(half[:0], half[:0], half[:0]), 0, 0)
            knowledge.costs.observe(0, 0.0, 0, forward_s(1))
    assert asked[True] == 250 and asked[False] <= 5


def test_a_crowd_that_copying_does_not_pay_for_looks_rarely():
    policy, knowledge = MeasuredLibraSpec(2, 2), Knowledge()
    nothing, num_asks = np.zeros(0), 0
    for index in range(4000):
        draft_s = None
        if asks_copying(policy, knowledge):
            draft_s = 0.1 * forward_s(1)  # and it never brings anything
            num_asks += index >= 2000
        learn(policy, knowledge, DraftStatistics(nothing, nothing, nothing, draft_s is not None), 0, 0, draft_s=draft_s)
        knowledge.costs.observe(0, 0.0, 0, forward_s(1))
    assert num_asks <= 35


def test_what_holds_in_a_crowd_is_not_believed_alone():
    """Copies bring a token for nothing alone; among 16 they cost what they bring. Both are known at once when the crowd changes."""
    policy, knowledge = MeasuredLibraSpec(2, 2), Knowledge()
    good = np.full(2, 0.9)

    def rounds(num_sharers: int, count: int) -> int:
        num_asked = 0
        for _ in range(count):
            is_asked = asks_copying(policy, knowledge)
            num_asked += is_asked
            statistics = DraftStatistics(good, good, good, is_local=True)
            num_verified = 2 if is_asked else 0
            tokens = num_sharers * (1 + num_verified)
            seconds = 0.004 + 0.0011 * tokens + 0.0005 * num_sharers
            draft_s = (1e-4 if num_sharers == 1 else 0.5 * seconds / num_sharers) if is_asked else None
            learn(policy, knowledge, statistics, num_verified, num_verified // 2, draft_s=draft_s)
            knowledge.costs.observe(
                0, 0.0, num_verified, seconds, verify_shared=SharedForward(seconds, tokens, num_sharers)
            )
        return num_asked

    assert rounds(1, 400) == 400
    assert rounds(16, 4000) < 1500
    rounds(1, 60)  # until the forwards tell that nobody shares them any more
    assert rounds(1, 100) == 100
    rounds(16, 60)
    assert rounds(16, 200) < 20
