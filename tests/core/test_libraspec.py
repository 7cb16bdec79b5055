"""LibraSpec's Algorithm 1 and the oracle against the worked examples."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdiff_dist.core.libraspec import best_length, expected_tokens, horizon, libraspec, oracle_length, survival_sums

DIP = [0.95, 0.9, 0.3, 0.6] + [0.9] * 20
WEAK = [0.10] + [0.99] * 40
DECAYING = [0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.52, 0.51, 0.49, 0.45]
EXAMPLES: list[tuple[str, Callable[[int], float], int, int, float, int, int, int]] = [
    ("constant", lambda t: 0.95, 4, 12, 2.0, 12, 3, 12),
    ("dip", lambda t: DIP[t - 1], 8, 12, 2.0, 5, 1, 8),
    ("weak first", lambda t: WEAK[t - 1], 6, 24, 2.2, 2, 1, 6),
    ("all ones", lambda t: 1.0, 3, 10, 2.2, 10, 4, 12),
    ("decaying", lambda t: DECAYING[t - 1], 4, 12, 2.0, 7, 2, 8),
]


def run(
    confidence: Callable[[int], float], block: int, max_length: int, alpha: float
) -> tuple[int, int, int, list[int]]:
    """Length, blocks, drafted tokens, and the sizes asked for."""
    rounds = libraspec(alpha, block, max_length)
    asked = [next(rounds)]
    while True:
        drafted = sum(asked)
        try:
            asked.append(rounds.send(np.array([confidence(t) for t in range(1, drafted + 1)])))
        except StopIteration as decided:
            return decided.value, drafted // block, drafted, asked


@pytest.mark.parametrize(("name", "confidence", "block", "longest", "alpha", "length", "blocks", "drafted"), EXAMPLES)
def test_worked_examples(name, confidence, block, longest, alpha, length, blocks, drafted) -> None:
    assert run(confidence, block, longest, alpha)[:3] == (length, blocks, drafted)


@pytest.mark.parametrize(
    ("confidences", "alpha", "sums", "steps"),
    [
        ([0.95] * 4, 2.0, [3.524381, 2.709875, 1.8525, 0.95], [8, 7, 6, 5]),
        (DIP[:8], 2.0, [2.691736, 1.833406, 1.037118, 2.45706, 3.0951, 2.439, 1.71, 0.9], [6, 5, 5, 8, 11, 10, 10, 9]),
        (WEAK[:6], 2.2, [0.585199], [2, 12, 11, 10, 9, 8]),
        (DECAYING[:4], 2.0, [2.736, 2.04, 1.4, 0.75], [6, 6, 5, 5]),
    ],
)
def test_sums_and_steps(confidences: list[float], alpha: float, sums: list[float], steps: list[int]) -> None:
    q = np.array(confidences)
    np.testing.assert_allclose(survival_sums(q)[: len(sums)], sums, atol=5e-7)
    assert np.floor(alpha * survival_sums(q) + np.arange(1, len(q) + 1) + 1e-12).astype(int).tolist() == steps
    assert horizon(q, alpha) == min(steps)


@pytest.mark.parametrize(
    ("confidence", "longest", "with_bonus", "without"),
    [
        (EXAMPLES[0][1], 12, (12, 0.304161), (12, 0.272911)),
        (EXAMPLES[1][1], 12, (5, 0.134156), (8, 0.096133)),
        (EXAMPLES[2][1], 24, (24, 0.071437), (24, 0.048710)),
        (EXAMPLES[3][1], 10, (10, 0.366667), (10, 0.333333)),
        (EXAMPLES[4][1], 12, (6, 0.164082), (6, 0.125621)),
    ],
)
def test_oracle(confidence: Callable[[int], float], longest: int, with_bonus: tuple, without: tuple) -> None:
    probs = np.array([confidence(t) for t in range(1, longest + 1)])
    for bonus, (length, value) in ((True, with_bonus), (False, without)):
        got = oracle_length(probs, 20.0, 1.0, bonus=bonus)
        assert got[0] == length and got[1] == pytest.approx(value, abs=1e-6)


probabilities = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=40)


@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 40), st.floats(0.05, 20.0))
def test_algorithm_1_ends_within_bounds(seed: int, block: int, longest: int, alpha: float) -> None:
    rng = np.random.default_rng(seed)
    values = rng.random(600) ** rng.choice([0.1, 1.0, 5.0])
    length, _, drafted, asked = run(lambda t: float(values[t - 1]), block, longest, alpha)
    assert 1 <= length <= max(block, longest)
    assert length <= drafted and all(size % block == 0 and size > 0 for size in asked)
    assert drafted < longest + 2 * block


@settings(max_examples=1000, deadline=None)
@given(probabilities, st.floats(1e-3, 100.0), st.floats(0.0, 10.0))
def test_expected_speed_is_unimodal_in_length(probs: list[float], base: float, slope: float) -> None:
    """With affine cost the first strict decrease of E(d)/T(d) ends the climb."""
    tokens = expected_tokens(np.array(probs))
    rates = tokens / (base + slope * np.arange(len(tokens)))
    falls = np.flatnonzero(np.diff(rates) < -1e-12 * rates.max())
    if len(falls):
        assert np.all(np.diff(rates[falls[0] :]) <= 1e-9 * rates.max())


@settings(max_examples=1000, deadline=None)
@given(probabilities, st.floats(1e-3, 10.0), st.floats(0.0, 1.0), st.floats(0.0, 5.0), st.integers(1, 8))
def test_best_length_is_the_exhaustive_argmax(
    probs: list[float], base: float, slope: float, draft: float, block: int
) -> None:
    def cost(length: int) -> float:
        return draft * -(-length // block) + base + slope * length

    survival, tokens, best_rate = 1.0, 1.0, 1.0 / cost(0)
    for length, probability in enumerate(probs, 1):
        survival *= probability
        tokens += survival
        best_rate = max(best_rate, tokens / cost(length))
    got = best_length(np.array(probs), cost)
    assert expected_tokens(np.array(probs))[got] / cost(got) == pytest.approx(best_rate, rel=1e-9)
    assert 0 <= got <= len(probs)
