"""Schedules, reveal orders and recorded proposals on tables small enough to work out by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from specdiff_dist.config import Effort
from specdiff_dist.core import sampling as draws
from specdiff_dist.core.randomness import Purpose, uniforms
from specdiff_dist.core.rows import SparseRows
from specdiff_dist.drafters.denoise import MASKED, Prediction, denoise
from specdiff_dist.errors import InvalidRows
from specdiff_dist.types import SamplingParams

SAMPLED, GREEDY = SamplingParams(1.0), SamplingParams(0.0)


class Table:
    """Fixed rows per position, whatever is revealed; remembers what it was asked."""

    def __init__(self, rows: list[list[float]]) -> None:
        self.rows = rows
        self.asked: list[tuple[list[int], list[int]]] = []

    def predict(self, block: np.ndarray, positions: np.ndarray) -> Prediction:
        self.asked.append((block.tolist(), positions.tolist()))
        rows = [self.rows[position] for position in positions]
        entropies = [-sum(p * np.log(p) for p in row if p > 0) for row in rows]
        return Prediction(
            SparseRows.from_rows([(np.arange(len(row)), np.array(row)) for row in rows]),
            np.array([max(row) for row in rows], np.float32),
            np.array(entropies, np.float32),
        )


def run(table: Table, effort: Effort, sampling=SAMPLED, *, draft_top_k=64, seed=0, anchor=10):
    return denoise(table.predict, len(table.rows), effort, sampling, draft_top_k, seed, anchor)


def revealed_at(table: Table, token_ids: np.ndarray) -> list[list[int]]:
    """Positions revealed by each step, from what the next step was shown."""
    shown = [np.array(block) != MASKED for block, _ in table.asked] + [np.ones(len(token_ids), bool)]
    return [np.flatnonzero(after & ~before).tolist() for before, after in itertools.pairwise(shown)]


@pytest.mark.parametrize(
    ("num_tokens", "num_steps", "counts"),
    [(5, 1, [5]), (5, 2, [3, 2]), (7, 3, [3, 2, 2]), (4, 4, [1, 1, 1, 1]), (3, 8, [1, 1, 1]), (1, 1, [1])],
)
@pytest.mark.parametrize("order", ["left_to_right", "max_prob", "token_prob", "entropy"])
def test_every_step_reveals_its_share(num_tokens, num_steps, counts, order):
    table = Table([[0.5, 0.3, 0.2]] * num_tokens)
    token_ids, proposals, confidences, max_probs = run(table, Effort(num_steps, order))
    assert [len(step) for step in revealed_at(table, token_ids)] == counts
    assert proposals.num_rows == len(confidences) == len(max_probs) == num_tokens
    assert token_ids.dtype == np.int32
    assert set(token_ids.tolist()) <= {0, 1, 2}


def test_left_to_right_asks_only_for_what_it_reveals():
    table = Table([[0.5, 0.5]] * 5)
    token_ids, *_ = run(table, Effort(2, "left_to_right"))
    first = token_ids[:3].tolist()
    assert table.asked == [([MASKED] * 5, [0, 1, 2]), ([*first, MASKED, MASKED], [3, 4])]


# Position: 0 is spread, 1 is nearly certain, 2 has a clear favourite but a long tail, 3 is one of two.
FOUR = [
    [0.25, 0.25, 0.25, 0.25],
    [0.97, 0.01, 0.01, 0.01],
    [0.52, 0.16, 0.16, 0.16],
    [0.51, 0.49, 0.00, 0.00],
]


@pytest.mark.parametrize(
    ("order", "steps"),
    [("left_to_right", [[0], [1], [2], [3]]), ("max_prob", [[1], [2], [3], [0]]), ("entropy", [[1], [3], [2], [0]])],
)
def test_orders_that_look_at_the_distribution(order, steps):
    for seed in range(5):  # the sample changes nothing
        table = Table(FOUR)
        token_ids, *_ = run(table, Effort(4, order), seed=seed)
        assert revealed_at(table, token_ids) == steps


def test_token_prob_order_looks_at_the_sample(monkeypatch):
    monkeypatch.setattr(draws, "draw_index", lambda weights, uniform: 1)
    table = Table(FOUR)  # the token drawn is 1: probabilities .25, .01, .16, .49
    token_ids, proposals, confidences, _ = run(table, Effort(4, "token_prob"))
    assert revealed_at(table, token_ids) == [[3], [0], [2], [1]]
    assert token_ids.tolist() == [1, 1, 1, 1]
    np.testing.assert_allclose(confidences, [0.25, 0.01, 0.16, 0.49], rtol=1e-6)
    assert proposals.row(3)[1].tolist() == np.array([0.51, 0.49], np.float32).tolist()


@pytest.mark.parametrize("order", ["max_prob", "token_prob", "entropy"])
def test_ties_go_to_the_left(order, monkeypatch):
    monkeypatch.setattr(draws, "draw_index", lambda weights, uniform: 0)
    table = Table([[0.5, 0.5]] * 4)
    token_ids, *_ = run(table, Effort(2, order))
    assert revealed_at(table, token_ids) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("order", "num_draws"), [("left_to_right", 4), ("max_prob", 4), ("entropy", 4), ("token_prob", 6)]
)
def test_only_what_is_needed_is_drawn(order, num_draws, monkeypatch):
    drawn: list[float] = []

    def count(weights: np.ndarray, uniform: float) -> int:
        drawn.append(uniform)
        return 0

    monkeypatch.setattr(draws, "draw_index", count)
    run(Table([[0.6, 0.4]] * 4), Effort(2, order))
    assert len(drawn) == num_draws  # token_prob draws 4, then the 2 that are left


def test_every_draw_uses_the_number_of_its_position_and_step():
    rows = [np.random.default_rng(i).dirichlet(np.ones(60)).tolist() for i in range(4)]
    token_ids, *_ = run(Table(rows), Effort(2, "left_to_right"), seed=77, anchor=123)
    for position, token in enumerate(token_ids):
        number = uniforms(77, Purpose.DRAFT, position, 1, stream=123, step=position // 2)[0]
        law = np.array(rows[position], np.float32).astype(np.float64)
        assert token == draws.draw_index(law / law.sum(), number)


def test_the_same_call_gives_the_same_block_and_another_anchor_another():
    rows = [[1 / 8] * 8] * 16
    first, again = run(Table(rows), Effort(3, "token_prob")), run(Table(rows), Effort(3, "token_prob"))
    assert first[0].tolist() == again[0].tolist()
    assert first[0].tolist() != run(Table(rows), Effort(3, "token_prob"), anchor=11)[0].tolist()
    assert first[0].tolist() != run(Table(rows), Effort(3, "token_prob"), seed=1)[0].tolist()


def test_the_proposal_recorded_is_the_row_of_the_step_that_revealed():
    """Position 1's row changes once position 0 is known."""

    def predict(block: np.ndarray, positions: np.ndarray) -> Prediction:
        rows = [[0.5, 0.5] if block[0] == MASKED else [0.125, 0.875] for _ in positions]
        flat = SparseRows.from_rows([(np.arange(2), np.array(row)) for row in rows])
        return Prediction(flat, np.array([max(row) for row in rows], np.float32), np.zeros(len(rows), np.float32))

    _, proposals, confidences, max_probs = denoise(predict, 2, Effort(2), SAMPLED, 64, 3, 0)
    assert [proposals.row(i)[1].tolist() for i in range(2)] == [[0.5, 0.5], [0.125, 0.875]]
    assert max_probs.tolist() == [0.5, 0.875]
    assert confidences[0] == 0.5
    assert confidences[1] in (0.125, 0.875)


def test_one_hot_early_reveal_marks_all_but_the_last_step():
    table = Table(FOUR)
    token_ids, proposals, confidences, _ = run(table, Effort(2, "max_prob", "one_hot"))
    assert revealed_at(table, token_ids) == [[1, 2], [0, 3]]
    for position in (1, 2):
        assert proposals.row(position)[0].tolist() == [token_ids[position]]
        assert proposals.row(position)[1].tolist() == [1.0]
    np.testing.assert_allclose(proposals.row(0)[1], FOUR[0])
    np.testing.assert_allclose(proposals.row(3)[1], FOUR[3][:2])
    np.testing.assert_allclose(confidences, [FOUR[i][token] for i, token in enumerate(token_ids)], rtol=1e-6)


def test_one_step_ignores_one_hot_early_reveal():
    _, proposals, *_ = run(Table(FOUR), Effort(1, "max_prob", "one_hot"))
    assert np.diff(proposals.row_splits).tolist() == [4, 4, 4, 2]


@pytest.mark.parametrize("order", ["left_to_right", "max_prob", "token_prob", "entropy"])
def test_greedy_drafts_are_one_hot_with_the_probability_at_temperature_1(order, monkeypatch):
    monkeypatch.setattr(draws, "draw_index", lambda *_: pytest.fail("nothing is drawn"))
    rows = [[0.1, 0.9], [0.6, 0.4], [0.3, 0.7]]
    token_ids, proposals, confidences, max_probs = run(Table(rows), Effort(2, order), GREEDY)
    assert token_ids.tolist() == [1, 0, 1]
    assert proposals.token_ids.tolist() == [1, 0, 1]
    assert proposals.probs.tolist() == [1.0, 1.0, 1.0]
    np.testing.assert_allclose(confidences, [0.9, 0.6, 0.7])
    np.testing.assert_allclose(max_probs, [0.9, 0.6, 0.7])


def test_no_tokens_make_an_empty_block_without_a_forward():
    table = Table([])
    token_ids, proposals, confidences, max_probs = run(table, Effort(4))
    assert (len(token_ids), proposals.num_rows, len(confidences), len(max_probs)) == (0, 0, 0, 0)
    assert table.asked == []


def test_rows_wider_than_draft_top_k_are_refused():
    with pytest.raises(InvalidRows, match="draft_top_k"):
        run(Table(FOUR), Effort(1), draft_top_k=3)


def test_a_missing_row_is_refused():
    def predict(block: np.ndarray, positions: np.ndarray) -> Prediction:
        return Prediction(SparseRows.one_hot([0]), np.ones(1, np.float32), np.zeros(1, np.float32))

    with pytest.raises(InvalidRows, match="2 positions"):
        denoise(predict, 2, Effort(1), SAMPLED, 64, 0, 0)
