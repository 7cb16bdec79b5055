"""A cluster and its load from what is known: a trace, or a few numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdiff_dist.core.throughput import LineFit
from specdiff_dist.simulate.cluster import BatchCost
from specdiff_dist.simulate.trace import RoundTrace

NUM_SAMPLES = 1000


def batch_cost(line: LineFit) -> BatchCost:
    """Cost of one session's call → of a shared forward: the base is paid once, every token counts."""
    return BatchCost(line.intercept, 0.0, line.slope)


def recorded_rounds(requests: Sequence[Sequence[RoundTrace]]) -> list[tuple[int, int]]:
    """(verified, accepted) of every round."""
    return [(one.length, one.num_accepted) for rounds in requests for one in rounds]


def assumed_rounds(length: int, acceptance: float) -> list[tuple[int, int]]:
    """(verified, accepted) at a fixed length and acceptance probability per position: quantiles of the law."""
    at_least = acceptance ** np.arange(1, length + 1)  # P(accepted ≥ j)
    quantiles = (np.arange(NUM_SAMPLES) + 0.5) / NUM_SAMPLES
    return [(length, int(np.sum(at_least > quantile))) for quantile in quantiles]


def recorded_rounds_per_s(requests: Sequence[Sequence[RoundTrace]]) -> float:
    """What the recorded pair did, one session at a time, without each request's first round."""
    rounds = [one for request in requests for one in request[1:]]
    seconds = sum(one.wall_s for one in rounds)
    return len(rounds) / seconds if seconds else 0.0
