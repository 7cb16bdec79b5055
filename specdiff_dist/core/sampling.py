"""The two random decisions of speculative decoding. Everything random in the system goes through these two functions,
so a test that enumerates their outcomes enumerates the law of the whole system (tests/law)."""

from __future__ import annotations

import numpy as np

from specdiff_dist.core.rows import FloatArray


def count_accepted(ratios: FloatArray, uniforms: FloatArray) -> int:
    """Number of leading positions with u < ratio. `ratios`, `uniforms`: float64 [d].

    u ∈ [0, 1), so a ratio of 0 never accepts and a ratio ≥ 1 always does.
    """
    rejected = np.flatnonzero(~(uniforms < ratios))
    return int(rejected[0]) if len(rejected) else len(ratios)


def draw_index(weights: FloatArray, uniform: float) -> int:
    """Index drawn in proportion to `weights` (float64 [n], ≥ 0, sum > 0) by inverse CDF; never one of weight 0."""
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    if index >= len(weights):  # u·total rounded up to total
        index = int(np.flatnonzero(weights)[-1])
    return index
