"""`bench speed --sweep`: cells, frontier, picture."""

from __future__ import annotations

import pytest

from specdiff_dist.bench.speed import Answer, Rounds
from specdiff_dist.bench.sweep import CELLS, Point, cell_name, cell_quality, frontier, sweep_report
from specdiff_dist.pictures import draw_sweep


def answered(seconds: float, total_tv: float = 0.0) -> list[Answer]:
    return [Answer((1, 2, 3, 4), seconds, rounds=Rounds(2, (1, 1), total_tv))]


@pytest.fixture
def report():
    """λ makes faster and farther, K slower and nearer; K = 2 at λ = 1 is beaten by nobody, K = 4 is always slow."""
    answers = {"generate": answered(12.0), "plain": answered(6.0)}
    for steps, leniency in CELLS:
        answers[cell_name(steps, leniency)] = answered(3.0 + steps - leniency, 4 * leniency / steps)
    return sweep_report({"one": answers, "two": answers})


def test_all_cells_are_reported_over_all_sets(report):
    assert [(cell["k"], cell["leniency"]) for cell in report["sweep"]] == list(CELLS)
    cell = next(cell for cell in report["sweep"] if (cell["k"], cell["leniency"]) == (2, 0.4))
    assert cell["speedup_vs_plain"] == pytest.approx(6 / 4.6)
    assert cell["speedup_vs_generate"] == pytest.approx(12 / 4.6)
    assert cell["mean_tv"] == pytest.approx(0.2)
    assert cell["acceptance_length"] == 2
    assert report["num_prompts"] == 2
    assert report["baselines"]["plain"]["tokens_per_s"] == pytest.approx(4 / 6)


def test_the_frontier_is_what_no_other_cell_matches(report):
    best = {(one["k"], one["leniency"]) for one in report["frontier"]}
    assert best == {(1, leniency) for leniency in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)}  # here more steps never pay
    points = [Point(1, 0.0, 1.0, 0.0), Point(1, 1.0, 3.0, 0.5), Point(2, 1.0, 2.0, 0.2), Point(2, 0.5, 0.9, 0.1)]
    assert frontier(points) == [points[0], points[2], points[1]]
    assert frontier([points[0], points[0]]) == [points[0], points[0]]  # equals do not beat each other


def test_a_cell_keeps_what_else_was_asked_for():
    quality = cell_quality({"speculation": 6, "effort": {"early_reveal": "one_hot"}}, 2, 0.4)
    assert quality == {
        "tier": "high", "rule": "linear", "leniency": 0.4, "speculation": 6,
        "effort": {"early_reveal": "one_hot", "num_denoising_steps": 2},
    }  # fmt: skip
    assert cell_quality({"tier": "fast"}, 1, 0.0)["tier"] == "fast"


def test_the_picture_is_drawn(report, tmp_path):
    draw_sweep(tmp_path / "a.png", report["sweep"])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
