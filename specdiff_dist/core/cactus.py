"""The Cactus rule's γ: how far the probability of a draft token may be raised within a KL budget δ (nats).

For a token of target probability p, γ ∈ [p, 1] is its probability under the conditional target p̃. KL(p̃ ‖ p) is then the
binary divergence Φ(γ) = γ ln(γ/p) + (1-γ) ln((1-γ)/(1-p)). Two ways to γ:
    taylor   as published (Cactus, arXiv 2604.04987): γ = min(1, p + √(2δp(1-p))). It under-spends δ for small p and
             over-spends it from p ≈ .35 upward.
    exact    the root of Φ(γ) = δ ("Speculative Diffusion is a Tale of Two Tradeoffs", App. E).
"""

from __future__ import annotations

import numpy as np

from specdiff_dist.core.rows import FloatArray

MAX_NEWTON_ITERATIONS = 8
_TOLERANCE = 1e-12  # on Φ(γ) - δ


def taylor_gamma(target_probs: FloatArray, delta: float) -> FloatArray:
    """γ as published. `target_probs` float64 [n] in [0, 1]; returns [n]. p = 0 gives 0, p = 1 gives 1."""
    p = target_probs
    return np.minimum(p + np.sqrt(2.0 * delta * p * (1.0 - p)), 1.0)


def binary_kl(gamma: FloatArray, target_probs: FloatArray) -> FloatArray:
    """Φ(γ) in nats, float64 [n]; 0·ln 0 = 0."""
    g, p = gamma, target_probs
    with np.errstate(divide="ignore", invalid="ignore"):
        left = np.where(g > 0.0, g * np.log(g / p), 0.0)
        right = np.where(g < 1.0, (1.0 - g) * (np.log1p(-g) - np.log1p(-p)), 0.0)
    return left + right


def exact_gamma(target_probs: FloatArray, delta: float) -> tuple[FloatArray, int]:
    """γ with Φ(γ) = δ by Newton's method; also the number of iterations used.

    Φ is convex and increasing on (p, 1) with Φ'(p) = 0, so Newton must not start at p. Pinsker's inequality gives
    Φ(p + √(δ/2)) ≥ δ: started right of the root it descends monotonically, no damping needed. The start is tightened by
    Φ(γ) ≥ (γ-p)²/2v, with v the largest x(1-x) between p and γ (Pinsker is v = 1/4).
    Edges: p ≤ 0 → 0; p ≥ 1 or δ ≥ -ln p → 1; δ = 0 → p.
    """
    p = np.clip(np.asarray(target_probs, np.float64), 0.0, 1.0)
    gamma = p.copy()
    if delta <= 0.0:
        return gamma, 0
    with np.errstate(divide="ignore"):
        log_p = np.log(p)
    gamma[(p > 0.0) & (delta >= -log_p)] = 1.0
    todo = np.flatnonzero((p > 0.0) & (p < 1.0) & (delta < -log_p))
    if not len(todo):
        return gamma, 0
    p, log_p = p[todo], log_p[todo]
    log_rest = np.log1p(-p)
    start = p + np.sqrt(delta / 2.0)
    for _ in range(2):
        widest = np.clip(0.5, p, np.minimum(start, 1.0))
        start = np.minimum(start, p + np.sqrt(2.0 * delta * widest * (1.0 - widest)))
    value_gamma = np.minimum(start, 1.0 - 1e-12)
    rest = 1.0 - value_gamma  # kept beside γ: each has the digits that the other loses at its end
    for iteration in range(1, MAX_NEWTON_ITERATIONS + 1):
        log_gamma, log_one_minus = np.log(value_gamma), np.log(rest)
        value = value_gamma * (log_gamma - log_p) + rest * (log_one_minus - log_rest) - delta
        if np.all(np.abs(value) <= _TOLERANCE):
            iteration -= 1
            break
        slope = (log_gamma - log_one_minus) - (log_p - log_rest)  # Φ'(γ) > 0 right of p
        step = np.minimum(value / np.where(slope > 0.0, slope, np.inf), value_gamma - p)
        value_gamma, rest = value_gamma - step, rest + step
    gamma[todo] = value_gamma
    return gamma, iteration
