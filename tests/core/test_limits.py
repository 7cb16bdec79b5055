"""Budgets hold for every rule, and what is spent is what the law says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdiff_dist.core.limits import TVLimits, decide
from specdiff_dist.core.rules import Cactus, Lenience, Linear, Lossless, Rule, TVBudget, Typical
from specdiff_dist.core.support import SupportRows
from specdiff_dist.errors import InvalidConfig

rules = st.one_of(
    st.just(Lossless()),
    st.builds(Linear, st.floats(0, 1)),
    st.builds(TVBudget, st.floats(0, 1)),
    st.builds(Cactus, st.floats(0, 20), st.sampled_from(["exact", "taylor"])),
    st.builds(Lenience, st.floats(0, 0.99)),
    st.builds(Typical, st.floats(0, 1)),
)


def random_rows(seed: int, num_rows: int) -> SupportRows:
    rng = np.random.default_rng(seed)
    p_parts, q_parts, index, entropy = [], [], [], []
    for row in range(num_rows):
        vocab = 12
        p = rng.dirichlet(np.full(vocab, rng.choice([0.1, 1.0])))
        size = int(rng.integers(1, 8))
        on = rng.choice(vocab, size, replace=False)
        p_parts.append(p[on])
        q_parts.append(rng.dirichlet(np.ones(size)))
        index.append(np.full(size, row))
        entropy.append(-(p * np.log(np.maximum(p, 1e-300))).sum())
    return SupportRows(
        np.concatenate(p_parts), np.concatenate(q_parts), np.concatenate(index), num_rows, np.array(entropy)
    )


@settings(max_examples=1000, deadline=None)
@given(rules, st.integers(0, 2**32 - 1), st.integers(1, 6), st.floats(0, 1), st.floats(0, 3))
def test_budgets_are_never_exceeded(rule: Rule, seed: int, num_rows: int, per_token: float, total: float) -> None:
    rows = random_rows(seed, num_rows)
    free = decide(rule, rows)
    decision = decide(rule, rows, TVLimits(per_token, total))
    assert np.all((decision.accept_probs >= 0.0) & (decision.accept_probs <= 1.0))
    assert np.all(decision.tv <= per_token + 1e-11)
    assert decision.tv.sum() <= total + 1e-11
    assert np.all(decision.tv <= free.tv + 1e-12)
    untouched = ~decision.is_limited
    np.testing.assert_allclose(decision.tv[untouched], free.tv[untouched], atol=1e-15)
    # What is limited spends all that is left, as Theorem 1 allows.
    spent = np.concatenate([[0.0], np.cumsum(decision.tv)[:-1]])
    left = np.minimum(per_token, total - spent)
    np.testing.assert_allclose(decision.tv[decision.is_limited], left[decision.is_limited], atol=1e-9)


def test_spent_means_exact() -> None:
    rows = random_rows(3, 5)
    decision = decide(Linear(0.8), rows, TVLimits(tv_left=0.0))
    np.testing.assert_allclose(decision.accept_probs, Lossless().accept_probs(rows), atol=1e-15)
    assert decision.tv.sum() == 0.0


@pytest.mark.parametrize("bad", [-0.1, float("nan")])
def test_bad_limits(bad: float) -> None:
    with pytest.raises(InvalidConfig):
        TVLimits(max_tv_per_token=bad)
    with pytest.raises(InvalidConfig):
        TVLimits(tv_left=bad)
