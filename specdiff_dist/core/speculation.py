"""Speculation policies: how many tokens to draft, and how many of them are worth verifying.

A policy is a value. `plan(policy, knowledge)` is one round of it as a coroutine: it yields how many more tokens to draft,
is sent the `DraftStatistics` of everything drafted in this round, and returns the speculative length (0: decode plainly).

Exactness: a policy that reads `token_prob` looks at the sample it decides about (trap 2). `max_prob` and `sum_squares`
(Σ q², the chance that two draws agree) belong to the distribution alone.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from specdiff_dist.core.asking import Askings
from specdiff_dist.core.calibration import AcceptanceCalibration
from specdiff_dist.core.costs import MeasuredCosts
from specdiff_dist.core.libraspec import best_length, horizon, libraspec
from specdiff_dist.core.rows import FloatArray
from specdiff_dist.errors import InvalidConfig

STATISTICS = ("max_prob", "sum_squares", "token_prob")
MAX_LENGTH = 256


@dataclass(frozen=True, slots=True, eq=False)
class DraftStatistics:
    """What a policy may know of the n tokens drafted so far in a round, each float64 [n]."""

    token_probs: FloatArray
    max_probs: FloatArray
    sum_squares: FloatArray
    is_local: bool = False  # see DraftBlock

    def __len__(self) -> int:
        return len(self.token_probs)

    def of(self, statistic: str) -> FloatArray:
        if statistic == "max_prob":
            return self.max_probs
        return self.sum_squares if statistic == "sum_squares" else self.token_probs


@dataclass(slots=True)
class Knowledge:
    """What policies learn from rounds. All but `additive_length` is shared by the sessions of one drafter-verifier pair."""

    calibration: AcceptanceCalibration = field(default_factory=AcceptanceCalibration)
    costs: MeasuredCosts = field(default_factory=MeasuredCosts.unknown)
    drafter: Askings = field(default_factory=Askings)  # whoever drafts with a model, or elsewhere
    copying: Askings = field(default_factory=partial(Askings, copies=True))  # by the caller itself
    additive_length: int | None = None  # this session's, of the additive policy

    @property
    def num_sharers(self) -> float:
        """Calls per verifier forward, lately."""
        return self.costs.verification.num_sharers

    def tells_drafter(self, policy: Policy) -> bool:
        """Whether a session that begins now is to know of the drafter."""
        return not isinstance(policy, MeasuredLibraSpec) or self.drafter.at(self.num_sharers).is_told()

    def tells_copying(self, policy: Policy) -> bool:
        """Whether one that does not know of the drafter is to copy."""
        return not isinstance(policy, MeasuredLibraSpec) or self.copying.at(self.num_sharers).is_told()

    def for_session(self) -> Knowledge:
        """What a new session starts with: the shared part."""
        return Knowledge(self.calibration, self.costs, self.drafter, self.copying)


Plan = Generator[int, DraftStatistics, int]


@dataclass(frozen=True, slots=True)
class Off:
    """Plain decoding, K = 0."""


@dataclass(frozen=True, slots=True)
class Static:
    """Always `length` tokens."""

    length: int

    def __post_init__(self) -> None:
        _check_lengths(length=self.length)


@dataclass(frozen=True, slots=True)
class ConfidenceThreshold:
    """Up to `length` tokens, cut before the first whose statistic falls below `threshold` (at least one is kept)."""

    threshold: float
    length: int
    statistic: str = "max_prob"

    def __post_init__(self) -> None:
        _check_lengths(length=self.length)
        _check_statistic(self.statistic)
        _check_unit("threshold", self.threshold)


@dataclass(frozen=True, slots=True)
class Additive:
    """The heuristic of transformers and Gemma-4 MTP: all accepted → 2 more next time, else 1 less."""

    start: int = 4
    max_length: int = 20

    def __post_init__(self) -> None:
        _check_lengths(start=self.start, max_length=self.max_length)


@dataclass(frozen=True, slots=True)
class FailFast:
    """Draft `block` more tokens until some token is unsure (statistic < `threshold`) or `max_length` is reached, then
    verify everything (FailFast, arXiv 2512.20573; its defaults .45, 10, 60)."""

    threshold: float = 0.45
    block: int = 10
    max_length: int = 60
    statistic: str = "token_prob"

    def __post_init__(self) -> None:
        _check_lengths(block=self.block, max_length=self.max_length)
        _check_statistic(self.statistic)
        _check_unit("threshold", self.threshold)


@dataclass(frozen=True, slots=True)
class LibraSpec:
    """Algorithm 1 of LibraSpec with its frozen α (2.0 … 2.2 in the paper)."""

    alpha: float = 2.0
    block: int = 4
    max_length: int = 12
    statistic: str = "token_prob"

    def __post_init__(self) -> None:
        _check_lengths(block=self.block, max_length=self.max_length)
        _check_statistic(self.statistic)
        if not 0.0 < self.alpha <= 1000.0:
            raise InvalidConfig(f"alpha must be in (0, 1000], not {self.alpha}")


@dataclass(frozen=True, slots=True)
class MeasuredLibraSpec:
    """LibraSpec's aim with measured numbers instead of α: the length with the most expected tokens per second, from
    calibrated acceptance probabilities and the costs that calls really have; 0 whenever drafting would lose."""

    block: int = 4
    max_length: int = 12
    statistic: str = "max_prob"

    def __post_init__(self) -> None:
        _check_lengths(block=self.block, max_length=self.max_length)
        _check_statistic(self.statistic)


Policy = Off | Static | ConfidenceThreshold | Additive | FailFast | LibraSpec | MeasuredLibraSpec


def plan(policy: Policy, knowledge: Knowledge) -> Plan:
    """One round of `policy`."""
    if isinstance(policy, MeasuredLibraSpec):
        return _measured(policy, knowledge)
    if isinstance(policy, LibraSpec):
        return _literal(policy)
    if isinstance(policy, FailFast):
        return _fail_fast(policy)
    if isinstance(policy, ConfidenceThreshold):
        return _threshold(policy)
    if isinstance(policy, Additive):
        return _fixed(_additive_length(policy, knowledge))
    return _fixed(policy.length if isinstance(policy, Static) else 0)


def asks_drafter(policy: Policy, knowledge: Knowledge) -> bool:
    """Whether a round is to ask the drafter. All policies do but the measured one, which does so while it pays, and to look."""
    costs = knowledge.costs
    if not isinstance(policy, MeasuredLibraSpec) or not costs.are_known:
        return True

    def expected() -> bool:
        """By what tokens are accepted on average."""
        block = min(policy.block, policy.max_length)
        draft_s = costs.draft(block)

        def cost(length: int) -> float:
            return _num_blocks(length, block) * draft_s + costs.verify(length)

        return best_length(knowledge.calibration.mean(policy.max_length), cost) > 0

    sharers = knowledge.num_sharers
    return knowledge.drafter.at(sharers).is_due(costs.verify(0), sharers, expected=expected)


def asks_copying(policy: Policy, knowledge: Knowledge) -> bool:
    """Whether a round that does not ask the drafter is to copy."""
    costs = knowledge.costs
    if not isinstance(policy, MeasuredLibraSpec) or not costs.verification.is_known:
        return True
    sharers = knowledge.num_sharers
    return knowledge.copying.at(sharers).is_due(costs.verify(0), sharers, expected=lambda: True)


def next_ask(policy: Policy, knowledge: Knowledge) -> int:
    """How many tokens `plan` will ask for first, after a round whose tokens have all been accepted."""
    if isinstance(policy, Additive):
        return min(_additive_length(policy, knowledge) + 2, policy.max_length)
    return next(plan(policy, knowledge), 0)


def learn(
    policy: Policy,
    knowledge: Knowledge,
    statistics: DraftStatistics,
    num_verified: int,
    num_accepted: int,
    *,
    draft_s: float | None = None,
) -> None:
    """Tells the policy how a round went. `draft_s`: seconds that drafting took from everybody, also where it brought nothing;
    None: nobody drafted, or nobody measured."""
    if isinstance(policy, Additive):
        length = _additive_length(policy, knowledge)
        grown = length + 2 if num_accepted == num_verified else length - 1
        knowledge.additive_length = min(max(grown, 1), policy.max_length)
    if isinstance(policy, MeasuredLibraSpec):
        sharers = knowledge.num_sharers
        for asking, is_local in ((knowledge.drafter.at(sharers), False), (knowledge.copying.at(sharers), True)):
            if draft_s is None or statistics.is_local != is_local:
                asking.since_look += 1
                continue
            asking.since_look = 0
            if knowledge.costs.verification.is_known:
                asking.rounds.observe(num_accepted + 1, draft_s + knowledge.costs.verify(num_verified))
        if num_verified:
            knowledge.calibration.observe(statistics.of(policy.statistic), num_verified, num_accepted)


def max_length(policy: Policy) -> int:
    """The most tokens a round of `policy` may submit."""
    if isinstance(policy, Off):
        return 0
    return policy.length if isinstance(policy, Static | ConfidenceThreshold) else policy.max_length


def statistic_of(policy: Policy) -> str | None:
    """The statistic a policy decides by; None if it looks at no draft."""
    return None if isinstance(policy, Off | Static | Additive) else policy.statistic


def _additive_length(policy: Additive, knowledge: Knowledge) -> int:
    return knowledge.additive_length or min(policy.start, policy.max_length)


def _fixed(length: int) -> Plan:
    if length == 0:
        return 0
    statistics = yield length
    return len(statistics)


def _threshold(policy: ConfidenceThreshold) -> Plan:
    statistics = yield policy.length
    below = np.flatnonzero(statistics.of(policy.statistic)[1:] < policy.threshold)
    return int(below[0]) + 1 if len(below) else len(statistics)


def _fail_fast(policy: FailFast) -> Plan:
    length = 0
    while length < policy.max_length:
        step = min(policy.block, policy.max_length - length)
        statistics = yield step
        if len(statistics) < length + step or statistics.of(policy.statistic).min() < policy.threshold:
            return len(statistics)
        length += step
    return length


def _literal(policy: LibraSpec) -> Plan:
    rounds = libraspec(policy.alpha, min(policy.block, policy.max_length), policy.max_length)
    wanted, asked = next(rounds), 0
    while True:
        statistics = yield wanted
        asked += wanted
        confidences = statistics.of(policy.statistic)
        if len(statistics) < asked:  # the drafter has no more: nothing to extend, still something to cut
            return min(horizon(confidences, policy.alpha), len(statistics), policy.max_length) if len(statistics) else 0
        try:
            wanted = rounds.send(confidences)
        except StopIteration as decided:
            return decided.value


def _measured(policy: MeasuredLibraSpec, knowledge: Knowledge) -> Plan:
    costs, calibration = knowledge.costs, knowledge.calibration
    block = min(policy.block, policy.max_length)
    if not costs.verification.is_known:  # nothing measured yet: one block tells
        statistics = yield block
        return len(statistics)

    verify_s = [costs.verify(length) for length in range(policy.max_length + 1)]
    drafted = floor = 0
    while True:
        statistics = yield min(block, policy.max_length - drafted)
        if len(statistics) <= drafted:  # the drafter has no more
            return drafted
        # A later block is drafted given the earlier ones, so its statistics must not decide about them (trap 2).
        floor, drafted = drafted, len(statistics)
        known = calibration.estimate(statistics.of(policy.statistic))
        acceptance = np.concatenate([known, calibration.mean(policy.max_length)[drafted:]])
        draft_s = 0.0 if statistics.is_local or not costs.draft.is_known else costs.draft(block)
        sunk = _num_blocks(drafted, block)

        def cost(length: int, draft_s: float = draft_s, sunk: int = sunk) -> float:
            return max(_num_blocks(length, block), sunk) * draft_s + verify_s[length]

        length = best_length(acceptance[: policy.max_length], cost, shortest=floor)
        if length <= drafted:
            return length


def _num_blocks(length: int, block: int) -> int:
    return -(-length // block)


def _check_lengths(**lengths: int) -> None:
    for name, length in lengths.items():
        if not 1 <= length <= MAX_LENGTH:
            raise InvalidConfig(f"{name} must be 1 … {MAX_LENGTH} tokens, not {length}")


def _check_statistic(statistic: str) -> None:
    if statistic not in STATISTICS:
        raise InvalidConfig(f"statistic must be one of {', '.join(STATISTICS)}, not {statistic!r}")


def _check_unit(what: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise InvalidConfig(f"{what} must be in [0, 1], not {value}")
