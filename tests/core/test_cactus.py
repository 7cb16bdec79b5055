"""γ of the Cactus rule against the table of the papers' sheet and against bisection."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdiff_dist.core.cactus import MAX_NEWTON_ITERATIONS, binary_kl, exact_gamma, taylor_gamma

TABLE = [  # p, δ, Taylor γ, KL that Taylor really spends, exact γ
    (1e-4, 1, 0.01424, 0.0566, 0.15548), (1e-4, 5, 0.03172, 0.1516, 0.61521), (1e-6, 5, 0.00316, 0.0223, 0.41093),
    (1e-8, 15, 0.00055, 0.0054, 0.83832), (0.01, 0.25, 0.08036, 0.0997, 0.14057), (0.01, 1, 0.15071, 0.2786, 0.35729),
    (0.1, 0.2, 0.28974, 0.1401, 0.33249), (0.1, 1, 0.52426, 0.5653, 0.68922), (0.35, 1, 1.0, 1.0498, 0.99232),
    (0.5, 0.2, 0.81623, 0.2161, 0.80517), (0.5, 0.25, 0.85355, 0.2767, 0.83789), (0.9, 0.01, 0.94243, 0.0116, 0.93959),
]  # fmt: skip


@pytest.mark.parametrize(("p", "delta", "taylor", "spent", "exact"), TABLE)
def test_table(p: float, delta: float, taylor: float, spent: float, exact: float) -> None:
    probs = np.array([p])
    published = taylor_gamma(probs, delta)
    gamma, iterations = exact_gamma(probs, delta)
    assert published[0] == pytest.approx(taylor, abs=6e-6)
    assert binary_kl(published, probs)[0] == pytest.approx(spent, abs=6e-5)
    assert gamma[0] == pytest.approx(exact, abs=1e-5)  # (the sheet truncates .332498)
    assert abs(binary_kl(gamma, probs)[0] - delta) <= 1e-10 and iterations <= MAX_NEWTON_ITERATIONS


def test_readme_example() -> None:
    """p = .35, q = .8, δ = .2: γ .6517 and acceptance .8146 as published, .6613 and .8266 exactly, .4375 lossless."""
    probs = np.array([0.35])
    assert taylor_gamma(probs, 0.2)[0] == pytest.approx(0.6517, abs=5e-5)
    assert taylor_gamma(probs, 0.2)[0] / 0.8 == pytest.approx(0.8146, abs=5e-5)
    assert exact_gamma(probs, 0.2)[0][0] == pytest.approx(0.6613, abs=5e-5)
    assert exact_gamma(probs, 0.2)[0][0] / 0.8 == pytest.approx(0.8266, abs=5e-5)


def test_edges() -> None:
    probs = np.array([0.0, 1.0, 0.3, np.exp(-1.0)])
    gamma, _ = exact_gamma(probs, 1.0)
    assert gamma[0] == 0.0 and gamma[1] == 1.0 and 0.3 < gamma[2] < 1.0 and gamma[3] == 1.0
    np.testing.assert_array_equal(exact_gamma(probs, 0.0)[0], probs)
    np.testing.assert_array_equal(taylor_gamma(probs, 0.0), probs)
    assert exact_gamma(np.zeros(0), 1.0)[0].shape == (0,)


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.floats(1e-9, 1.0), min_size=1, max_size=20), st.floats(1e-6, 20.0))
def test_newton_solves_and_stays_inside(probs: list[float], delta: float) -> None:
    p = np.array(probs)
    gamma, iterations = exact_gamma(p, delta)
    assert iterations <= MAX_NEWTON_ITERATIONS
    assert np.all(gamma >= p) and np.all(gamma <= 1.0)
    inner = gamma < 1.0
    assert np.all(np.abs(binary_kl(gamma, p)[inner] - delta) <= 1e-10)
    assert np.all(delta >= -np.log(p[~inner]) - 1e-12)
    for x, g in zip(p[inner][:3], gamma[inner][:3], strict=True):  # bisection agrees
        low, high = x, 1.0
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (low, middle) if binary_kl(np.array([middle]), np.array([x]))[0] > delta else (middle, high)
        assert g == pytest.approx(low, abs=1e-9)
