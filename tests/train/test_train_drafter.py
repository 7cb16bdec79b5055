"""The whole command on a tiny chat model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdiff_dist.cli import app
from specdiff_dist.drafters import load_drafter
from specdiff_dist.errors import InvalidConfig
from tests.train.tiny_chat import some_prompts, write_chat_model, write_prompts


def run(output: Path, verifier: Path, prompts: Path, *extra: str) -> dict:
    arguments = [
        "train-drafter", "--output", str(output), "--verifier", str(verifier), "--prompts", str(prompts),
        "--num-answers", "60", "--shard-size", "40", "--max-new-tokens", "24", "--self-written", "0",
        "--num-layers", "2", "--draft-vocab", "40", "--block-size", "4", "--device", "cpu", "--json", *extra,
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["specdiff", *arguments])
        found = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout.splitlines()[-1])


def test_one_command_makes_data_trains_and_exports(tmp_path):
    verifier = write_chat_model(tmp_path / "verifier")
    prompts = write_prompts(tmp_path / "prompts.jsonl", some_prompts(90))
    report = run(tmp_path / "out", verifier, prompts, "--steps", "30", "--learning-rate", "0.003")
    assert report["data"]["num_answers"] >= 60
    training = report["training"]
    assert training["num_steps"] == 30 and training["after"]["num_blocks"] > 20
    assert training["after"]["match"][0] >= training["before"]["match"][0]
    drafter = load_drafter(training["folder"], verifier=str(verifier), device="cpu")
    assert drafter.info.max_draft_tokens == 4
    card = (tmp_path / "out" / "drafter" / "README.md").read_text()
    assert "specdiff train-drafter --output out --verifier verifier" in card and str(tmp_path) not in card

    again = run(tmp_path / "out", verifier, prompts, "--steps", "30", "--learning-rate", "0.003")
    assert "data" not in again  # everything is there
    assert again["training"]["after"] == training["after"]


def test_data_only_and_minutes(tmp_path):
    verifier = write_chat_model(tmp_path / "verifier")
    prompts = write_prompts(tmp_path / "prompts.jsonl", some_prompts(90))
    assert set(run(tmp_path / "out", verifier, prompts, "--data-only")) == {"data"}
    assert not (tmp_path / "out" / "drafter").exists()
    report = run(tmp_path / "out", verifier, prompts, "--train-only", "--minutes", "0.15", "--patience", "100")
    assert set(report) == {"training"}
    assert report["training"]["seconds"] < 60 and not report["training"]["stopped_early"]
    for bad in (
        ["--minutes", "1", "--steps", "2"],
        ["--loss", "kl"],
        ["--layers", "a,b"],
        ["--weighting", "even"],
        ["--data-only", "--train-only"],
    ):
        found = CliRunner().invoke(app, ["train-drafter", "--output", str(tmp_path / "bad"), *bad])
        assert isinstance(found.exception, InvalidConfig)
