"""How fast a configuration should be, before it is run ("Speculative Diffusion is a Tale of Two Tradeoffs", Eq. 6-7).

    mean acceptance per position   ᾱ = 1 - (1-λ)·d_K            (Proposition 1; d_K: mean TV(p, q) at K denoising steps)
    tokens per round               E = Σ_{j=0}^{B} ᾱ^j           (Eq. 6; correction or bonus token counted)
    throughput                     E / (a + b·K + T(B))          (Eq. 7; T(d) = T0 + c·d is verification and the rest)

λ is the linear rule's leniency, B the speculative length. Agreement with the target is 1 - λ·d_K per position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from specdiff_dist.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class LineFit:
    """y = intercept + slope·x by least squares, seconds."""

    intercept: float
    slope: float

    @staticmethod
    def of(x: ArrayLike, y: ArrayLike) -> LineFit:
        """Raises InvalidConfig with fewer than two different x."""
        xs, ys = np.asarray(x, np.float64), np.asarray(y, np.float64)
        if len(np.unique(xs)) < 2:
            raise InvalidConfig("a cost fit needs measurements at two different sizes at least")
        slope, intercept = np.polyfit(xs, ys, 1)
        return LineFit(float(intercept), float(slope))

    def __call__(self, x: float) -> float:
        return self.intercept + self.slope * x


@dataclass(frozen=True, slots=True)
class ThroughputModel:
    """Draft cost a + bK, verify cost T0 + c·d, and the mean distance d_K at the efforts it was measured at."""

    draft_cost: LineFit
    verify_cost: LineFit
    mean_distance: dict[int, float]  # K -> d_K

    def acceptance(self, num_steps: int, leniency: float) -> float:
        """ᾱ of Proposition 1."""
        return 1.0 - (1.0 - leniency) * self.mean_distance[num_steps]

    def tokens_per_round(self, num_steps: int, leniency: float, length: int) -> float:
        """Eq. 6."""
        return float(np.sum(self.acceptance(num_steps, leniency) ** np.arange(length + 1)))

    def round_s(self, num_steps: int, length: int) -> float:
        """Seconds per round."""
        return self.draft_cost(num_steps) + self.verify_cost(length)

    def tokens_per_s(self, num_steps: int, leniency: float, length: int) -> float:
        """Eq. 7."""
        return self.tokens_per_round(num_steps, leniency, length) / self.round_s(num_steps, length)

    def agreement(self, num_steps: int, leniency: float) -> float:
        """1 - TV of the law sampled at a draft position to the target."""
        return 1.0 - leniency * self.mean_distance[num_steps]


def mean_distance(accept_probs: ArrayLike, reached: ArrayLike, leniency: float) -> float:
    """d_K from a run at leniency λ < 1: 1 - ᾱ = (1-λ)·d over the positions that were reached.

    Args:
        accept_probs: acceptance probability of each reached draft position given its rows (Σ_y q(y)·a(y)), any shape.
        reached: weight of each (0 or 1), same shape.
    """
    weights = np.asarray(reached, np.float64)
    if leniency >= 1.0 or weights.sum() == 0:
        raise InvalidConfig("d_K cannot be told from a run that accepts everything or reached nothing")
    rejected = 1.0 - np.asarray(accept_probs, np.float64)
    return float((rejected * weights).sum() / weights.sum() / (1.0 - leniency))
