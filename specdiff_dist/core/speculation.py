"""Speculation policies: how many tokens to draft, and how many of them are worth verifying.

A policy is a value; `num_to_draft` asks it before the drafter is called, `choose_length` once the block is known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdiff_dist.errors import InvalidConfig

STATISTICS = ("max_prob", "token_prob")


def _check_length(length: int) -> None:
    if not 1 <= length <= 256:
        raise InvalidConfig(f"speculative length must be 1 … 256, not {length}")


@dataclass(frozen=True, slots=True)
class Off:
    """Plain decoding, K = 0."""


@dataclass(frozen=True, slots=True)
class Static:
    """Always `length` tokens."""

    length: int

    def __post_init__(self) -> None:
        _check_length(self.length)


@dataclass(frozen=True, slots=True)
class ConfidenceThreshold:
    """Up to `length` tokens, cut before the first whose statistic falls below `threshold` (at least one is kept).

    statistic: `max_prob` looks at the distribution alone and keeps the exact law; `token_prob` looks at the sampled
    token's own probability, as FailFast and DSpark do, which conditions on the sample (trap 2).
    """

    threshold: float
    length: int
    statistic: str = "max_prob"

    def __post_init__(self) -> None:
        _check_length(self.length)
        if not 0.0 <= self.threshold <= 1.0:
            raise InvalidConfig(f"confidence threshold must be in [0, 1], not {self.threshold}")
        if self.statistic not in STATISTICS:
            raise InvalidConfig(f"statistic must be one of {', '.join(STATISTICS)}, not {self.statistic!r}")


Policy = Off | Static | ConfidenceThreshold


def num_to_draft(policy: Policy) -> int:
    """Tokens to ask the drafter for; 0 means: do not draft."""
    return 0 if isinstance(policy, Off) else policy.length


def choose_length(policy: Policy, token_probs: NDArray[np.floating], max_probs: NDArray[np.floating]) -> int:
    """Speculative length for a drafted block: how many of its n tokens to submit. Both arrays: [n]."""
    num_drafted = len(token_probs)
    if isinstance(policy, ConfidenceThreshold) and num_drafted:
        statistic = max_probs if policy.statistic == "max_prob" else token_probs
        below = np.flatnonzero(statistic[1:] < policy.threshold)  # the first token is always worth a look
        return int(below[0]) + 1 if len(below) else num_drafted
    return min(num_drafted, num_to_draft(policy))
