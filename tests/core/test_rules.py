"""Rules against the numbers of the papers, and receipts against brute force."""

from __future__ import annotations

import numpy as np
import pytest

from specdiff_dist.core import sampling
from specdiff_dist.core.acceptance import accept, residual
from specdiff_dist.core.rows import SparseRows
from specdiff_dist.core.rules import Linear, Lossless, Rule, accept_ratios, law_divergence
from specdiff_dist.errors import InvalidConfig, InvalidRows
from specdiff_dist.types import TargetRows

P = np.array([0.5, 0.3, 0.15, 0.05])
Q = np.array([0.1, 0.2, 0.3, 0.4])  # TV(P, Q) = .5
EVERYTHING = np.arange(4, dtype=np.int32)


def output_law(rule: Rule, p: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, float]:
    """Law of the emitted token and acceptance probability, from the product's own ratio and residual."""
    law = np.zeros(len(p))
    accepted = 0.0
    ids = np.arange(len(p), dtype=np.int32)
    support = np.flatnonzero(q)
    left = residual(ids, p, support.astype(np.int32), q[support])
    for y in support:
        a = min(1.0, float(accept_ratios(rule, p[[y]], q[[y]])[0]))
        law[y] += q[y] * a
        law += q[y] * (1 - a) * left / left.sum()
        accepted += q[y] * a
    return law, accepted


@pytest.mark.parametrize(
    ("leniency", "want_law", "want_accepted"),
    [
        (0.0, [0.5, 0.3, 0.15, 0.05], 0.5),
        (0.2, [0.42, 0.28, 0.18, 0.12], 0.6),
        (0.6, [0.26, 0.24, 0.24, 0.26], 0.8),
        (1.0, [0.1, 0.2, 0.3, 0.4], 1.0),
    ],
)
def test_linear_rule_worked_numbers(leniency: float, want_law: list[float], want_accepted: float) -> None:
    """Output law (1-λ)p + λq, acceptance 1 - (1-λ)TV(p, q)."""
    law, accepted = output_law(Linear(leniency), P, Q)
    np.testing.assert_allclose(law, want_law, atol=1e-12)
    assert accepted == pytest.approx(want_accepted, abs=1e-12)


def test_leniency_zero_is_lossless() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        p, q = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
        np.testing.assert_array_equal(accept_ratios(Linear(0.0), p, q), accept_ratios(Lossless(), p, q))
        np.testing.assert_allclose(output_law(Lossless(), p, q)[0], p, atol=1e-12)


def test_looser_never_accepts_less() -> None:
    rng = np.random.default_rng(1)
    p, q = rng.dirichlet(np.ones(50)), rng.dirichlet(np.ones(50))
    ratios = [np.minimum(accept_ratios(Linear(x), p, q), 1.0) for x in np.linspace(0, 1, 11)]
    assert all(np.all(tighter <= looser + 1e-15) for tighter, looser in zip(ratios, ratios[1:], strict=False))


@pytest.mark.parametrize("leniency", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_divergence_needs_only_the_proposals_support(leniency: float) -> None:
    """TV and KL in closed form equal those of the law itself, with q narrower than p and reaching out of it."""
    rng = np.random.default_rng(2)
    for _ in range(200):
        p, q = np.zeros(12), np.zeros(12)
        p[:9] = rng.dirichlet(np.ones(9))
        on = rng.choice(9, 4, replace=False)
        q[on] = rng.dirichlet(np.ones(4))
        law, _ = output_law(Linear(leniency), p, q)
        support = np.flatnonzero(q)
        tv, kl = law_divergence(Linear(leniency), p[support], q[support], np.zeros(len(support), np.int64), 1)
        positive = law > 0
        assert tv[0] == pytest.approx(0.5 * np.abs(law - p).sum(), abs=1e-12)
        assert kl[0] == pytest.approx(float((law[positive] * np.log(law[positive] / p[positive])).sum()), abs=1e-11)


def test_leaving_a_truncated_targets_support_is_infinite_kl_and_exact_tv() -> None:
    tv, kl = law_divergence(Linear(0.25), np.array([0.0, 0.4]), np.array([0.5, 0.5]), np.array([0, 0]), 1)
    assert np.isinf(kl[0]) and tv[0] == pytest.approx(0.25 * 0.6)


@pytest.mark.parametrize("leniency", [-0.1, 1.1, float("nan")])
def test_leniency_out_of_range(leniency: float) -> None:
    with pytest.raises(InvalidConfig, match="leniency"):
        Linear(leniency)


def narrow(*rows: np.ndarray) -> TargetRows:
    sparse = SparseRows.from_rows([(np.arange(len(row)), row) for row in rows])
    return TargetRows(sparse, sparse.row_sums(), None, None, 0)


@pytest.mark.parametrize("row", [np.eye(4)[2], np.full(4, 0.25), np.array([0.1, 0.2, 0.3, 0.4], np.float16)])
def test_equal_rows_never_reject_and_have_a_residual(row: np.ndarray) -> None:
    """K02 row 7: p = q leaves an all-zero residual; no NaN, no exception, a draw from p."""
    ids = np.flatnonzero(row).astype(np.int32)
    probs = row[ids].astype(np.float64)
    np.testing.assert_array_equal(residual(ids, probs, ids, probs), probs)
    proposals = SparseRows.from_rows([(EVERYTHING, row)])
    almost_one = np.nextafter(1.0, 0.0)
    for token in ids:
        for u in (0.0, 0.5, almost_one):
            token_ids = np.array([token], np.int32)
            outcome = accept(Lossless(), token_ids, proposals, narrow(row, row), np.array([u]), np.array([0.3, u]))
            assert outcome.num_accepted == 1 and row[outcome.token_ids[1]] > 0


def test_a_draft_token_outside_its_own_proposal_is_an_error() -> None:
    """K02 row 15, trap 3: never a silent change of rule."""
    with pytest.raises(InvalidRows, match="probability 0 in its own proposal"):
        accept(
            Lossless(), np.array([1], np.int32), SparseRows.one_hot([2]), narrow(P, P), np.zeros(1), np.zeros(2)
        )  # fmt: skip
    with pytest.raises(InvalidRows, match="came with"):
        accept(
            Lossless(), np.array([1, 1], np.int32), SparseRows.one_hot([1]), narrow(P, P, P), np.zeros(2), np.zeros(3)
        )  # fmt: skip


def test_greedy_target_literal_rule() -> None:
    """Temperature 0: a mismatch is accepted with probability λ; the correction is the argmax."""
    target = narrow(np.eye(4)[3], np.eye(4)[0])
    for u, want in ((0.29, [1, 0]), (0.31, [3])):
        outcome = accept(
            Linear(0.3), np.array([1], np.int32), SparseRows.one_hot([1]), target, np.array([u]), np.array([0.5, 0.5])
        )
        assert outcome.token_ids.tolist() == want
        assert outcome.tv[0] == pytest.approx(0.3) and np.isinf(outcome.kl[0])


def test_receipt_covers_reached_positions_only_and_bonus_is_free() -> None:
    q2 = np.array([0.0, 0.0, 0.5, 0.5])
    proposals = SparseRows.from_rows([(EVERYTHING, Q), (EVERYTHING, q2)])
    tokens = np.array([3, 2], np.int32)
    accepted = accept(Linear(0.5), tokens, proposals, narrow(P, P, P), np.zeros(2), np.full(3, 0.5))
    assert accepted.num_accepted == 2
    np.testing.assert_allclose(accepted.tv, [0.25, 0.5 * 0.5 * np.abs(q2 - P).sum(), 0.0], atol=1e-7)
    rejected = accept(Linear(0.5), tokens, proposals, narrow(P, P, P), np.array([0.999, 0.0]), np.full(3, 0.5))
    assert rejected.num_accepted == 0
    np.testing.assert_allclose(rejected.tv, [0.25], atol=1e-7)


def test_draw_index_partitions_the_unit_interval_exactly() -> None:
    """The primitive that the law tests replace: its pieces have the lengths of the weights, zeros are never drawn."""
    weights = np.array([0.0, 3.0, 0.0, 1.0, 4.0, 0.0])
    edges = np.cumsum(weights) / weights.sum()
    for index in (1, 3, 4):
        low, high = edges[index - 1], edges[index]
        assert sampling.draw_index(weights, float(low)) == index
        assert sampling.draw_index(weights, float(np.nextafter(high, 0.0))) == index
    for weight in (1e-300, 1.0, 1e300):
        assert sampling.draw_index(np.array([weight, 0.0]), float(np.nextafter(1.0, 0.0))) == 0


def test_count_accepted_uses_strict_less() -> None:
    assert sampling.count_accepted(np.array([0.0]), np.array([0.0])) == 0  # ratio 0 never accepts
    assert sampling.count_accepted(np.array([1.0, 2.0]), np.array([np.nextafter(1.0, 0.0)] * 2)) == 2
    assert sampling.count_accepted(np.array([0.5, 0.5, 0.5]), np.array([0.4, 0.5, 0.1])) == 1
    assert sampling.count_accepted(np.zeros(0), np.zeros(0)) == 0
