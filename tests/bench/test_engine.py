from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from specdiff_dist.bench.engine import CostFit, EngineCell, compare_logits, fit_cost, make_sessions, measure_cells
from specdiff_dist.cli import app
from specdiff_dist.verifiers import load_forward
from tests.tiny_models import VOCAB_SIZE, save_verifier, tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_verifier(tmp_path_factory.mktemp("verifier"), tiny_llama())


def test_one_forward_and_eight_agree(folder):
    model = load_forward(folder, "float32", "cpu")
    agreement = compare_logits(model, make_sessions(VOCAB_SIZE, num_cached=20))
    assert agreement.max_logit_difference < 1e-4
    assert agreement.same_greedy_tokens


def test_a_disagreement_would_show(folder):
    model = load_forward(folder, "float32", "cpu")
    forward_parts = model.forward_parts

    def mixed_up(parts):  # each session is given its neighbour's answer
        done = forward_parts(parts)
        return done[1:] + done[:1]

    model.forward_parts = mixed_up
    agreement = compare_logits(model, make_sessions(VOCAB_SIZE, num_cached=20))
    assert agreement.max_logit_difference > 0.1


def test_cells_are_measured(folder):
    model = load_forward(folder, "float32", "cpu")
    seen: list[EngineCell] = []
    cells = measure_cells(
        model, make_sessions(VOCAB_SIZE, num_cached=20), num_repeats=2, grid=[(1, 1), (3, 4)], on_cell=seen.append
    )
    assert seen == cells
    assert [(cell.num_sessions, cell.num_tokens) for cell in cells] == [(1, 1), (3, 4)]
    assert all(cell.together_ms > 0 and cell.apart_ms > 0 for cell in cells)


def test_the_fit_finds_the_plane():
    truth = CostFit(30.0, 2.0, 1.5, 0.0, 0.0)
    cells = [EngineCell(n, t, truth(n, t), 1.0) for n in (1, 2, 8) for t in (1, 4, 16)]
    fit = fit_cost(cells)
    assert (fit.base_ms, fit.per_token_ms, fit.per_session_ms) == pytest.approx((30.0, 2.0, 1.5))
    assert fit.largest_relative_error < 1e-9


def test_the_command(folder, tmp_path):
    picture = tmp_path / "engine.png"
    result = CliRunner().invoke(
        app, ["bench", "engine", "--model", str(folder), "--dtype", "float32", "--num-cached", "16", "--num-repeats", "1",
              "--picture", str(picture), "--json"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.strip().splitlines()[-1])
    assert {"batched_speedup", "max_logit_difference", "cost_fit"} <= report.keys()
    assert report["same_greedy_tokens"] and report["max_logit_difference"] < 1e-4
    assert picture.read_bytes().startswith(b"\x89PNG")
