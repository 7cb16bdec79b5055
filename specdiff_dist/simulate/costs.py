"""What rounds cost, told from the rounds themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdiff_dist.core.throughput import LineFit
from specdiff_dist.errors import InvalidConfig
from specdiff_dist.simulate.trace import RoundTrace


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds: one draft call by tokens drafted, one verify call by tokens submitted (both wall clock)."""

    draft: LineFit
    verify: LineFit

    def round_s(self, num_drafted: int, num_calls: int, length: int) -> float:
        """A round with `num_calls` draft calls of together `num_drafted` tokens."""
        drafting = num_calls * self.draft.intercept + self.draft.slope * num_drafted
        return (drafting if num_calls else 0.0) + self.verify(length)


def fit_costs(requests: Sequence[Sequence[RoundTrace]]) -> Costs:
    """Lines through the times of a trace, without each request's first round, whose calls carry the prompt.

    A drafter that was only ever asked for one number of tokens is taken to cost the same for any.
    Raises InvalidConfig when verify calls of one length only were recorded, or no draft.
    """
    rounds = [one for request in requests for one in request[1:]]
    drafted = [one for one in rounds if one.num_draft_calls]
    if not drafted or len({one.length for one in rounds}) < 2:
        raise InvalidConfig(
            "the trace's rounds are all of one length, so costs cannot be told from it; give --draft-cost and "
            "--verify-cost, or --costs-from another trace (policy 'additive' varies the length)"
        )
    calls = [(one.num_drafted / one.num_draft_calls, one.draft_s / one.num_draft_calls) for one in drafted]
    return Costs(_rising(calls), _rising([(one.length, one.verify_s) for one in rounds]))


def router_s(requests: Sequence[Sequence[RoundTrace]]) -> float:
    """Mean seconds of a round that are neither call."""
    rounds = [one for request in requests for one in request[1:]]
    return max(float(np.mean([one.wall_s - one.draft_s - one.verify_s for one in rounds])), 0.0) if rounds else 0.0


def _rising(points: Sequence[tuple[float, float]]) -> LineFit:
    """Least squares, flat where noise would make more tokens cheaper."""
    x, y = np.asarray(points).T
    line = LineFit(float(y.mean()), 0.0) if len(np.unique(x)) < 2 else LineFit.of(x, y)
    return line if line.slope >= 0.0 and line.intercept > 0.0 else LineFit(float(y.mean()), 0.0)
