"""What a speculation policy would have done on recorded rounds, against the oracle that knows the future."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdiff_dist.core.libraspec import expected_tokens
from specdiff_dist.core.speculation import Knowledge, Policy, asks_drafter, learn, plan
from specdiff_dist.errors import InvalidConfig
from specdiff_dist.simulate.costs import Costs
from specdiff_dist.simulate.trace import RoundTrace


@dataclass(frozen=True, slots=True)
class Replay:
    """One policy on one trace."""

    lengths: tuple[int, ...]  # per round
    oracle_lengths: tuple[int, ...]
    tokens: int  # accepted + 1 per round
    seconds: float  # by the costs
    plain_seconds: float  # the same number of tokens without drafting

    @property
    def mean_abs_deviation(self) -> float:
        return float(np.mean(np.abs(np.subtract(self.lengths, self.oracle_lengths))))

    @property
    def expected_speedup(self) -> float:
        return self.plain_seconds / self.seconds


def oracle(one: RoundTrace, costs: Costs, *, leniency: float = 0.0, shortest: int = 1) -> int:
    """The length with the most expected tokens per second of verification, by exhaustive search over the round's true
    acceptance probabilities; the smallest of equals. Drafting is sunk, as in LibraSpec's own oracle."""
    tokens = expected_tokens(one.acceptance(leniency))
    rates = [tokens[d] / costs.verify(d) for d in range(shortest, one.length + 1)]
    return shortest + int(np.argmax(rates))


def replay(policy: Policy, requests: Sequence[Sequence[RoundTrace]], costs: Costs, *, leniency: float = 0.0) -> Replay:
    """Drives `policy` over recorded rounds as the round loop would, learning included.

    A round's recorded block is cut to what the policy drafts; a policy that wants more than was recorded gets what there
    is. Rounds without a draft are left out.
    """
    shared = Knowledge()
    lengths: list[int] = []
    oracles: list[int] = []
    tokens, seconds = 0, 0.0
    for rounds in requests:
        knowledge = shared.for_session()
        for one in rounds:
            if one.length == 0:
                continue
            length, num_drafted, num_calls = _choose(policy, knowledge, one)
            accepted_run = np.append(one.is_accepted(leniency)[:length], False)
            num_accepted = int(np.argmin(accepted_run))
            drafting = costs.round_s(num_drafted, num_calls, length) - costs.verify(length)
            draft_s = drafting if num_calls else None
            learn(policy, knowledge, one.statistics(length), length, num_accepted, draft_s=draft_s)
            knowledge.costs.observe(num_drafted, drafting / max(num_calls, 1), length, costs.verify(length))
            lengths.append(length)
            oracles.append(oracle(one, costs, leniency=leniency))
            tokens += num_accepted + 1
            seconds += costs.round_s(num_drafted, num_calls, length)
    if not lengths:
        raise InvalidConfig("the trace holds no drafted round; record one with speculation on")
    return Replay(tuple(lengths), tuple(oracles), tokens, seconds, tokens * costs.verify(0))


def _choose(policy: Policy, knowledge: Knowledge, one: RoundTrace) -> tuple[int, int, int]:
    """Length, tokens drafted and draft calls of one round."""
    if not asks_drafter(policy, knowledge):
        return 0, 0, 0
    steps = plan(policy, knowledge)
    drafted = calls = 0
    try:
        wanted = next(steps)
        while True:
            more = min(wanted, one.length - drafted)
            drafted += max(more, 0)
            calls += more > 0
            wanted = steps.send(one.statistics(drafted))
    except StopIteration as decided:
        return min(decided.value, drafted), drafted, calls
