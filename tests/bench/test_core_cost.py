"""`specdiff bench core`: the block it times, the baseline it compares with, and its goals."""

from __future__ import annotations

import numpy as np
import pytest

from specdiff_dist.bench.core import LENIENCY, RULES, Block, make_block, measure_core, newton_quality
from specdiff_dist.core.rules import Linear, Rule


@pytest.fixture(scope="module")
def block() -> Block:
    return make_block(500, 6, 8)


def test_the_rows_are_distributions(block: Block) -> None:
    block.proposals.check(vocab_size=500)
    for target in (block.sparse, block.dense):
        target.rows.check(vocab_size=500)
        assert target.rows.num_rows == 7
    assert np.diff(block.sparse.rows.row_splits).max() == 8 and np.all(np.diff(block.dense.rows.row_splits) == 500)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_worst_case_is_timed(block: Block, rule: Rule) -> None:
    """All positions but the last are accepted, and a token is recovered."""
    outcome = block.accept(rule, block.sparse)
    assert outcome.num_accepted == 5 and len(outcome.token_ids) == len(outcome.tv) == 6


def test_the_baseline_makes_the_same_decision(block: Block) -> None:
    outcome, baseline = block.accept(Linear(LENIENCY), block.dense), block.baseline()
    assert outcome.num_accepted == baseline.one_row()[0] == baseline.all_rows()[0] == 5
    tv, kl = baseline.receipt()
    np.testing.assert_allclose(outcome.tv, tv, atol=1e-6)
    np.testing.assert_allclose(outcome.kl, kl, atol=1e-5)


def test_newton_meets_its_goal() -> None:
    iterations, error = newton_quality(400, 40)
    assert 1 <= iterations <= 8
    assert error <= 1e-10


@pytest.mark.slow
def test_goals_at_full_size() -> None:
    cost = measure_core(num_runs=100)
    print(cost)
    assert cost.sparse_ms <= 1.0 and cost.dense_ms <= 25.0
    assert cost.ratio_vs_dense_torch > 1.0
