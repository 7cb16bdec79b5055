"""Rules against the numbers of the papers, and receipts against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from specdiff_dist.core import sampling
from specdiff_dist.core.acceptance import accept, residual
from specdiff_dist.core.limits import decide
from specdiff_dist.core.rows import SparseRows
from specdiff_dist.core.rules import Cactus, Lenience, Linear, Lossless, Rule, TVBudget, Typical
from specdiff_dist.core.support import SupportRows
from specdiff_dist.errors import InvalidConfig, InvalidRows
from specdiff_dist.types import TargetRows

P = np.array([0.5, 0.3, 0.15, 0.05])
Q = np.array([0.1, 0.2, 0.3, 0.4])  # TV(P, Q) = .5
EVERYTHING = np.arange(4, dtype=np.int32)


def support_of(p: np.ndarray, q: np.ndarray) -> SupportRows:
    """One position's rows as a rule sees them."""
    on = np.flatnonzero(q)
    positive = p[p > 0]
    entropy = np.array([-(positive * np.log(positive)).sum()])
    return SupportRows(p[on], q[on], np.zeros(len(on), np.int64), 1, entropy)


def brute_law(rule: Rule, p: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, float]:
    """Law of the emitted token and acceptance probability: every draft token, every recovered token, one by one."""
    law, accepted = np.zeros(len(p)), 0.0
    everything = np.arange(len(p), dtype=np.int32)
    on = np.flatnonzero(q)
    accept_probs = rule.accept_probs(support_of(p, q))
    for y, a in zip(on, accept_probs, strict=True):
        law[y] += q[y] * a
        accepted += q[y] * a
        if a < 1.0:
            left = residual(everything, p, on.astype(np.int32), q[on], rule.residual_scale(float(p[y])))
            law += q[y] * (1 - a) * left / left.sum()
    return law, accepted


def random_pair(rng: np.random.Generator, vocab: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """A target, sometimes truncated, and a narrower proposal that may leave its support."""
    p, q = rng.dirichlet(np.full(vocab, rng.choice([0.2, 1.0, 4.0]))), np.zeros(vocab)
    if rng.random() < 0.3:
        p[rng.choice(vocab, 3, replace=False)] = 0.0
        p /= p.sum()
    on = rng.choice(vocab, rng.integers(1, 7), replace=False)
    q[on] = rng.dirichlet(np.ones(len(on)))
    return p, q


LOSSY = [
    Linear(0.3), Linear(1.0), TVBudget(0.05), TVBudget(0.4), Cactus(0.01), Cactus(0.25), Cactus(5.0),
    Cactus(0.25, "taylor"), Cactus(2.0, "taylor"), Lenience(0.2), Lenience(0.9), Typical(0.3), Typical(1.0),
]  # fmt: skip
AT_ZERO = [Linear(0.0), TVBudget(0.0), Cactus(0.0), Cactus(0.0, "taylor"), Lenience(0.0), Typical(0.0)]


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
    law, accepted = brute_law(Linear(leniency), P, Q)
    np.testing.assert_allclose(law, want_law, atol=1e-12)
    assert accepted == pytest.approx(want_accepted, abs=1e-12)


@pytest.mark.parametrize(
    ("rule", "want_law", "want_accepted"),
    [
        (Lenience(0.2), [0.46, 0.29, 0.1875, 0.0625], 0.55),
        (Lenience(0.5), [0.34, 0.26, 0.3, 0.1], 0.7),
        (Cactus(0.25), [0.2228, 0.2139, 0.3, 0.2633], 0.8633),
        (Cactus(1.0), [0.1, 0.2, 0.3, 0.4], 1.0),
    ],
)
def test_other_worked_numbers(rule: Rule, want_law: list[float], want_accepted: float) -> None:
    law, accepted = brute_law(rule, P, Q)
    np.testing.assert_allclose(law, want_law, atol=5e-5)
    assert accepted == pytest.approx(want_accepted, abs=5e-5)


def test_the_cactus_bound_is_not_a_bound_on_the_law() -> None:
    """KL(p̃_y ‖ p) ≤ δ = .25 for every y, but the law sampled is at KL .393."""
    rows = support_of(P, Q)
    kl = decide(Cactus(0.25), rows).kl[0]
    assert kl == pytest.approx(0.393, abs=5e-4) and kl > 0.25
    gamma = Cactus(0.25)._gamma(P)
    conditional = gamma * np.log(gamma / P) + (1 - gamma) * np.log((1 - gamma) / (1 - P))
    np.testing.assert_allclose(conditional, 0.25, atol=1e-10)


@pytest.mark.parametrize("rule", LOSSY, ids=str)
def test_the_closed_form_law_is_the_law(rule: Rule) -> None:
    """TV and KL from the proposals' support alone equal those of the enumerated law."""
    rng = np.random.default_rng(2)
    for _ in range(300):
        p, q = random_pair(rng)
        law, _ = brute_law(rule, p, q)
        assert law.sum() == pytest.approx(1.0, abs=1e-12)
        decision = decide(rule, support_of(p, q))
        positive = law > 0
        with np.errstate(divide="ignore"):
            kl = float((law[positive] * np.log(law[positive] / p[positive])).sum())
        assert decision.tv[0] == pytest.approx(0.5 * np.abs(law - p).sum(), abs=1e-12)
        assert (np.isinf(kl) and np.isinf(decision.kl[0])) or decision.kl[0] == pytest.approx(kl, abs=1e-9)


@pytest.mark.parametrize("rule", AT_ZERO, ids=str)
def test_leniency_zero_is_lossless(rule: Rule) -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        p, q = random_pair(rng)
        rows = support_of(p, q)
        np.testing.assert_allclose(rule.accept_probs(rows), Lossless().accept_probs(rows), atol=1e-15)
        np.testing.assert_allclose(brute_law(rule, p, q)[0], p, atol=1e-12)


@pytest.mark.parametrize(
    "ladder",
    [
        [Linear(x) for x in np.linspace(0, 1, 11)],
        [TVBudget(x) for x in np.linspace(0, 1, 11)],
        [Cactus(x) for x in (0, 1e-3, 0.1, 0.5, 1, 4, 20)],
        [Cactus(x, "taylor") for x in (0, 1e-3, 0.1, 0.5, 1, 4, 20)],
        [Lenience(x) for x in np.linspace(0, 0.95, 11)],
        [Typical(x) for x in np.linspace(0, 1, 11)],
    ],
    ids=lambda ladder: str(ladder[-1]),
)
def test_looser_never_accepts_less(ladder: list[Rule]) -> None:
    rng = np.random.default_rng(1)
    for _ in range(100):
        rows = support_of(*random_pair(rng))
        accept_probs = [rule.accept_probs(rows) for rule in ladder]
        assert all(np.all(a <= b + 1e-12) for a, b in itertools.pairwise(accept_probs))


def test_tv_budget_spends_the_budget_and_no_more() -> None:
    """Theorem 1: TV of the law is min(ε, TV(p, q))."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        rows = support_of(*random_pair(rng))
        tv = decide(TVBudget(0.1), rows).tv[0]
        assert tv == pytest.approx(min(0.1, rows.total_variation[0]), abs=1e-12)


def test_leaving_a_truncated_targets_support_is_infinite_kl_and_exact_tv() -> None:
    rows = SupportRows(np.array([0.0, 0.4]), np.array([0.5, 0.5]), np.array([0, 0]), 1, np.zeros(1))
    decision = decide(Linear(0.25), rows)
    assert np.isinf(decision.kl[0]) and decision.tv[0] == pytest.approx(0.25 * 0.6)


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


@pytest.mark.parametrize("rule", LOSSY, ids=str)
def test_a_block_is_decided_row_by_row(rule: Rule) -> None:
    """Rows of a block, of different widths and one of them one-hot, are decided as each would be alone."""
    rng = np.random.default_rng(4)
    pairs = [random_pair(rng) for _ in range(20)] + [(P, np.eye(4)[3]), (np.eye(4)[0], Q), (P, P)]
    alone = [support_of(p, q) for p, q in pairs]
    block = SupportRows(
        np.concatenate([rows.target_probs for rows in alone]),
        np.concatenate([rows.draft_probs for rows in alone]),
        np.repeat(np.arange(len(alone)), [len(rows.draft_probs) for rows in alone]),
        len(alone),
        np.concatenate([rows.entropy for rows in alone]),
    )
    got, want = decide(rule, block), [decide(rule, rows) for rows in alone]
    np.testing.assert_allclose(got.accept_probs, np.concatenate([d.accept_probs for d in want]), atol=1e-11)
    np.testing.assert_allclose(got.tv, np.concatenate([d.tv for d in want]), atol=1e-11)
    np.testing.assert_allclose(got.kl, np.concatenate([d.kl for d in want]), atol=1e-11)
