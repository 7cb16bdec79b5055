"""LibraSpec: how many drafted tokens are worth verifying (paper 2, Algorithm 1), literally and with measured costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator

import numpy as np

from specdiff_dist.core.rows import FloatArray

_INTEGER_SLACK = 1e-12  # αS_i that is an integer up to rounding counts as that integer


def survival_sums(confidences: FloatArray) -> FloatArray:
    """S_i = Σ_{j=i}^{d} Π_{k=i}^{j} q_k for i = 1 … d, by S_i = q_i (1 + S_{i+1}). float64 [d] -> [d]."""
    sums = np.empty(len(confidences))
    later = 0.0
    for i in range(len(confidences) - 1, -1, -1):
        later = float(confidences[i]) * (1.0 + later)
        sums[i] = later
    return sums


def horizon(confidences: FloatArray, alpha: float) -> int:
    """ε* = min_i ⌊α S_i + i⌋ over the drafted tokens; at least 1, since ε_i ≥ i."""
    steps = np.floor(alpha * survival_sums(confidences) + np.arange(1, len(confidences) + 1) + _INTEGER_SLACK)
    return int(steps.min())


def libraspec(alpha: float, block: int, max_length: int) -> Generator[int, FloatArray, int]:
    """Algorithm 1 as a coroutine: yields how many more tokens to draft, is sent the confidences of all drafted so far,
    returns the speculative length.

    Our readings where the paper is silent: ε* is clamped to `max_length` before the budget B is charged; sums run to the
    current length d; floor as written; B is not credited on roll-back (what lies beyond d is wasted).
    """
    confidences = yield block
    length, budget = block, 0
    while length < max_length:
        wanted = min(horizon(confidences[:length], alpha), max_length)
        if wanted <= length:
            return wanted  # one roll-back at most
        budget -= wanted - length
        length = wanted
        if budget < 0:
            num_blocks = math.ceil(-budget / block)
            confidences = yield num_blocks * block
            budget += num_blocks * block
    return length


def expected_tokens(accept_probs: FloatArray, *, bonus: bool = True) -> FloatArray:
    """Expected tokens of a round by speculative length: [Σ_{j≤d} Π_{k≤j} a_k (+1)] for d = 0 … n. [n] -> [n + 1]."""
    return np.concatenate([[0.0], np.cumsum(np.cumprod(accept_probs))]) + (1.0 if bonus else 0.0)


def best_length(accept_probs: FloatArray, cost: Callable[[int], float], *, shortest: int = 0) -> int:
    """argmax over `shortest` ≤ d ≤ n of expected tokens per second, E(d)/cost(d); the smallest of equals.

    Exhaustive on purpose: with block-wise draft costs E/cost has several local maxima.
    """
    tokens = expected_tokens(accept_probs).tolist()
    rates = [tokens[d] / cost(d) for d in range(shortest, len(tokens))]
    return shortest + rates.index(max(rates))


def oracle_length(
    accept_probs: FloatArray,
    verify_base: float,
    verify_per_token: float,
    *,
    bonus: bool = True,
    max_length: int | None = None,
) -> tuple[int, float]:
    """d* = argmax_{1≤d≤dmax} E(d)/(T0 + c·d) and its value; for replay, where the true probabilities are known."""
    probs = accept_probs if max_length is None else accept_probs[:max_length]
    tokens = expected_tokens(probs, bonus=bonus)[1:]
    rates = tokens / (verify_base + verify_per_token * np.arange(1, len(probs) + 1))
    best = int(np.argmax(rates > rates.max() - 1e-15))
    return best + 1, float(rates[best])
