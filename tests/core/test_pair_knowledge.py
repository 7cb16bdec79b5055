"""Which sessions learn from each other."""

from __future__ import annotations

import numpy as np

from specdiff_dist.config import DecodeConfig, Effort
from specdiff_dist.core.calibration import NUM_BINS
from specdiff_dist.core.pair_knowledge import MAX_KINDS, PairKnowledge
from specdiff_dist.core.rules import Linear, Lossless
from specdiff_dist.core.speculation import Knowledge, MeasuredLibraSpec
from specdiff_dist.types import DrafterInfo

EXACT = DecodeConfig(Lossless())


def acceptance(knowledge: Knowledge) -> float:
    return float(knowledge.calibration.estimate(np.array([0.5]))[0])


def teach(knowledge: Knowledge, num_accepted: int) -> None:
    for _ in range(50):
        knowledge.calibration.observe(np.array([0.5]), 1, num_accepted)
    knowledge.costs.observe(4, 0.01, 4, 0.1)


def test_sessions_of_one_kind_learn_from_each_other():
    pair = PairKnowledge()
    teach(pair.for_session(EXACT, None, is_greedy=False), 1)
    later = pair.for_session(EXACT, None, is_greedy=False)
    assert acceptance(later) > 0.9
    assert later.costs.are_known
    assert later.drafter.at(1.0).since_look == 0


def test_another_rule_effort_or_greed_is_another_kind():
    pair = PairKnowledge()
    teach(pair.for_session(DecodeConfig(Linear(0.8)), None, is_greedy=False), 1)
    for config, is_greedy in (
        (EXACT, False),
        (DecodeConfig(Linear(0.2)), False),
        (DecodeConfig(Linear(0.8), Effort(2)), False),
        (DecodeConfig(Linear(0.8)), True),
    ):
        other = pair.for_session(config, None, is_greedy=is_greedy)
        assert acceptance(other) == 0.5  # as untaught
        assert not other.costs.draft.is_known
        assert other.costs.verification.is_known  # the verifier is the same


def test_the_policy_is_not_part_of_the_kind():
    pair = PairKnowledge()
    teach(pair.for_session(DecodeConfig(Lossless()), None, is_greedy=True), 0)
    assert (
        acceptance(pair.for_session(DecodeConfig(Lossless(), policy=MeasuredLibraSpec()), None, is_greedy=True)) < 0.1
    )


def test_kinds_are_bounded_and_the_oldest_goes_first():
    pair = PairKnowledge()
    teach(pair.for_session(EXACT, None, is_greedy=False), 1)
    for index in range(MAX_KINDS - 1):
        pair.for_session(DecodeConfig(Linear(0.5 + index / 1000)), None, is_greedy=False)
    assert acceptance(pair.for_session(EXACT, None, is_greedy=False)) > 0.9
    for index in range(MAX_KINDS):
        pair.for_session(DecodeConfig(Linear(0.1 + index / 1000)), None, is_greedy=False)
    assert acceptance(pair.for_session(EXACT, None, is_greedy=False)) == 0.5


def test_what_a_drafters_training_found_is_the_first_guess():
    info = DrafterInfo("d", 9, 8, 7, ("left_to_right",), False, True, calibration=((0.2,) * NUM_BINS,))
    assert acceptance(PairKnowledge().for_session(EXACT, info, is_greedy=False)) == 0.2
