"""Speculation policies, each driven as the round loop drives it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdiff_dist.core.asking import PROBE_EVERY, Asking
from specdiff_dist.core.libraspec import best_length, expected_tokens
from specdiff_dist.core.speculation import (
    Additive,
    ConfidenceThreshold,
    DraftStatistics,
    FailFast,
    Knowledge,
    LibraSpec,
    MeasuredLibraSpec,
    Off,
    Policy,
    Static,
    asks_drafter,
    learn,
    max_length,
    plan,
)  # fmt: skip
from specdiff_dist.errors import InvalidConfig

TOKEN = np.array([0.2, 0.9, 0.4, 0.9])
LARGEST = np.array([0.5, 0.9, 0.6, 0.3])


def statistics(token: np.ndarray, largest: np.ndarray | None = None) -> DraftStatistics:
    return DraftStatistics(token, token if largest is None else largest, token)


def drive(
    policy: Policy, draft: Callable[[int], DraftStatistics], knowledge: Knowledge | None = None, room: int = 10**6
) -> tuple[int, list[int]]:
    """Length and the sizes of the draft calls; `draft(n)` gives the statistics of the first n tokens."""
    knowledge = knowledge or Knowledge()
    asked: list[int] = []
    if not asks_drafter(policy, knowledge):
        return 0, asked
    steps = plan(policy, knowledge)
    try:
        wanted = next(steps)
        while True:
            asked.append(min(wanted, room - sum(asked)))
            wanted = steps.send(draft(sum(asked)))
            assert len(asked) < 1000
    except StopIteration as decided:
        return decided.value, asked


def first(n: int) -> DraftStatistics:
    return statistics(TOKEN[:n], LARGEST[:n])


@pytest.mark.parametrize(
    ("policy", "asked", "length"),
    [
        (Off(), [], 0),
        (Static(4), [4], 4),
        (Static(2), [2], 2),
        (ConfidenceThreshold(0.55, 4), [4], 3),
        (ConfidenceThreshold(0.95, 4), [4], 1),
        (ConfidenceThreshold(0.0, 4), [4], 4),
        (ConfidenceThreshold(0.5, 4, "token_prob"), [4], 2),
        (FailFast(0.45, 2, 4, "max_prob"), [2, 2], 4),
        (FailFast(0.45, 2, 4, "token_prob"), [2], 2),
        (LibraSpec(2.0, 2, 4, "max_prob"), [2], 2),
        (Additive(3), [3], 3),
    ],
)
def test_lengths(policy: Policy, asked: list[int], length: int) -> None:
    assert drive(policy, first) == (length, asked)


@pytest.mark.parametrize(
    "policy",
    [Static(8), ConfidenceThreshold(0.1, 8), FailFast(0.1, 4, 12), LibraSpec(9.0, 4, 12), MeasuredLibraSpec(4, 12)],
    ids=str,
)
@pytest.mark.parametrize("room", [0, 1, 3])
def test_a_drafter_with_less_to_give_ends_the_round(policy: Policy, room: int) -> None:
    """The end of the context, or a failing drafter: what there is, is submitted; no endless asking."""
    length, asked = drive(policy, lambda n: statistics(np.full(min(n, room), 0.9)), room=room)
    assert length <= room
    assert len(asked) < 10


def test_additive_grows_by_two_and_shrinks_by_one() -> None:
    policy, knowledge = Additive(3, 6), Knowledge()
    lengths = []
    for accepted_all in (True, True, True, False, False, False, False, False, False, False):
        length, _ = drive(policy, lambda n: statistics(np.full(n, 0.5)), knowledge)
        lengths.append(length)
        learn(policy, knowledge, statistics(np.full(length, 0.5)), length, length if accepted_all else 0)
    assert lengths == [3, 5, 6, 6, 5, 4, 3, 2, 1, 1]


def taught(draft_s: float, verify_base_s: float, verify_per_token_s: float, acceptance: float = 0.8) -> Knowledge:
    knowledge = Knowledge()
    for _ in range(200):
        for length in (0, 4, 8, 12):
            knowledge.costs.observe(4, draft_s, length, verify_base_s + verify_per_token_s * length)
    rng = np.random.default_rng(0)
    for _ in range(2000):
        run = int(np.argmin(np.append(rng.random(12) < acceptance, False)))
        knowledge.calibration.observe(np.full(12, 0.6), 12, run)
    return knowledge


@pytest.mark.parametrize("rounds_per_session", [100, 3])
def test_measured_turns_off_when_drafting_loses_and_probes(rounds_per_session: int) -> None:
    """K = 0 whenever speculation would lose; it looks again, ever more rarely, be the answers ever so short."""
    policy = MeasuredLibraSpec(4, 12)
    shared = knowledge = taught(draft_s=0.1, verify_base_s=0.04, verify_per_token_s=0.001, acceptance=0.3)
    lengths = []
    for index in range(800):
        if index % rounds_per_session == 0:
            knowledge = shared.for_session()
        length, asked = drive(policy, lambda n: statistics(np.full(n, 0.6)), knowledge)
        lengths.append(length)
        learn(
            policy, knowledge, statistics(np.full(length, 0.6)), length, 0, draft_s=0.1 if asked else None
        )  # fmt: skip
    assert np.flatnonzero(lengths).tolist() == [15, 47, 111, 239, 495, 751]


def test_a_look_comes_after_forwards_and_soon_again_once_drafting_has_paid() -> None:
    losing = Asking()

    def num_until_look(num_sharers: float) -> int:
        for count in range(10_000):
            if losing.is_due(0.01, num_sharers, expected=lambda: False):
                return count + 1
            losing.since_look += 1
        raise AssertionError("it never looks")

    assert [num_until_look(8.0) for _ in range(3)] == [8 * 16, 8 * 32, 8 * 64]
    good = taught(draft_s=0.001, verify_base_s=0.04, verify_per_token_s=0.0001)
    good.drafter.at(1.0).period = 256
    assert drive(MeasuredLibraSpec(4, 12), lambda n: statistics(np.full(n, 0.6)), good)[0] > 0
    assert good.drafter.at(1.0).period == PROBE_EVERY


def test_a_few_unlucky_rounds_do_not_end_drafting() -> None:
    policy, knowledge = MeasuredLibraSpec(8, 8), Knowledge()
    for _ in range(3):
        length, _ = drive(policy, lambda n: statistics(np.full(n, 0.5)), knowledge)
        assert length > 0
        learn(policy, knowledge, statistics(np.full(length, 0.5)), length, 0, draft_s=0.01)
        knowledge.costs.observe(8, 0.01, length, 0.06 + 0.003 * length)
    assert drive(policy, lambda n: statistics(np.full(n, 0.5)), knowledge)[1]


def test_measured_uses_what_calls_cost() -> None:
    policy = MeasuredLibraSpec(4, 12)

    def length_with(**costs: float) -> int:
        return drive(policy, lambda n: statistics(np.full(n, 0.6)), taught(**costs))[0]

    cheap = length_with(draft_s=0.002, verify_base_s=0.04, verify_per_token_s=0.0001)
    dear = length_with(draft_s=0.002, verify_base_s=0.04, verify_per_token_s=0.02)
    assert cheap >= 8 and 1 <= dear <= 3


def test_measured_first_rounds_do_not_need_knowledge() -> None:
    assert drive(MeasuredLibraSpec(4, 12), lambda n: statistics(np.full(n, 0.6))) == (4, [4])


@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 16))
def test_measured_equals_the_exhaustive_argmax(seed: int, block: int, longest: int) -> None:
    """Over everything drafted (and not before what a later block was drafted given), by the costs it was told."""
    rng = np.random.default_rng(seed)
    draft_s, base_s, slope_s = rng.uniform(0, 0.02), rng.uniform(0.01, 0.1), rng.uniform(0, 0.02)
    knowledge = Knowledge()
    for length in (0, 1, 5, 9, 13) * 40:
        knowledge.costs.observe(block, draft_s, length, base_s + slope_s * length)
    confidences = rng.random(64)
    policy = MeasuredLibraSpec(block, longest)
    length, asked = drive(policy, lambda n: statistics(confidences[:n]), knowledge)
    drafted, block = sum(asked), min(block, longest)
    assert length <= drafted <= longest
    if not asked:
        return
    costs = knowledge.costs
    estimates = np.concatenate(
        [knowledge.calibration.estimate(confidences[:drafted]), knowledge.calibration.mean(longest)[drafted:]]
    )[:longest]
    tokens = expected_tokens(estimates)
    floor = drafted - asked[-1]

    def cost(d: int) -> float:
        return max(-(-d // block), -(-drafted // block)) * costs.draft(block) + costs.verify(d)

    rates = [tokens[d] / cost(d) for d in range(len(tokens))]
    assert rates[length] == pytest.approx(max(rates[floor:]), rel=1e-12)
    assert length == best_length(estimates, cost, shortest=floor)


@settings(max_examples=1000, deadline=None)
@given(
    st.sampled_from([Static(5), ConfidenceThreshold(0.5, 6), FailFast(0.4, 3, 9), LibraSpec(2.0, 3, 9)]),
    st.integers(0, 2**32 - 1),
)
def test_every_policy_stays_within_its_bounds(policy: Policy, seed: int) -> None:
    values = np.random.default_rng(seed).random(600)
    length, asked = drive(policy, lambda n: statistics(values[:n]))
    assert 1 <= length <= max_length(policy) and length <= sum(asked)


@pytest.mark.parametrize(
    "policy",
    [
        Additive(9, 2), FailFast(0.1, 9, 2), LibraSpec(1000.0, 9, 2), LibraSpec(1000.0, 5, 12), LibraSpec(2.0, 5, 12),
        MeasuredLibraSpec(9, 2),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("room", [1, 14, 600])
def test_no_policy_submits_more_than_its_max_length(policy: Policy, room: int) -> None:
    """Whatever its block or its start, and also where the drafter ends in the middle of a block."""
    length, _ = drive(policy, lambda n: statistics(np.full(min(n, room), 0.9)), room=room)
    assert length <= min(max_length(policy), room)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Static(0),
        lambda: Static(257),
        lambda: ConfidenceThreshold(1.5, 4),
        lambda: ConfidenceThreshold(float("nan"), 4),
        lambda: ConfidenceThreshold(0.5, 4, "entropy"),
        lambda: LibraSpec(0.0),
        lambda: LibraSpec(block=0),
        lambda: FailFast(2.0),
        lambda: Additive(0),
        lambda: MeasuredLibraSpec(statistic="nothing"),
    ],
)
def test_out_of_range(make: Callable[[], Policy]) -> None:
    with pytest.raises(InvalidConfig):
        make()
