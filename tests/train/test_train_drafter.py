"""The whole command on a tiny chat model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdiff_dist import load_pair
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
    options = ("--steps", "30", "--learning-rate", "0.003", "--patience", "100")
    report = run(tmp_path / "out", verifier, prompts, *options)
    assert report["data"]["num_answers"] >= 60
    training = report["training"]
    assert training["num_steps"] == 30 and training["after"]["num_blocks"] > 20
    assert training["after"]["match"][0] >= training["before"]["match"][0]
    drafter = load_drafter(training["folder"], verifier=str(verifier), device="cpu")
    assert drafter.info.max_draft_tokens == 4
    card = (tmp_path / "out" / "drafter" / "README.md").read_text()
    assert "specdiff train-drafter --output out --verifier verifier" in card and str(tmp_path) not in card

    again = run(tmp_path / "out", verifier, prompts, *options)
    assert "data" not in again  # everything is there
    assert again["training"]["after"] == training["after"]


def test_features_from_one_command_to_answers(tmp_path):
    """Resumed, nothing is made twice; the drafter answers in a pair of its own verifier."""
    verifier = write_chat_model(tmp_path / "verifier")
    prompts = write_prompts(tmp_path / "prompts.jsonl", some_prompts(90))
    options = ("--architecture", "features", "--feature-layers", "0,1", "--steps", "6", "--evaluations", "1")
    training = run(tmp_path / "out", verifier, prompts, *options)["training"]
    made = sorted((tmp_path / "out" / "features" / "0-1").glob("shard-*.npy"))
    stamps = [path.stat().st_mtime_ns for path in made]
    again = run(tmp_path / "out", verifier, prompts, *options)["training"]
    assert len(made) > 1 and again["after"] == training["after"]
    assert [path.stat().st_mtime_ns for path in made] == stamps
    with load_pair(str(verifier), drafter=training["folder"], dtype="float32", device="cpu") as pair:
        assert pair.drafter is not None and pair.drafter.engine.info.feature_layers == (0, 1)
        answer = pair.generate("w1 w2 w3", temperature=0.0, max_tokens=12, ignore_eos=True)
    assert len(answer.token_ids) == 12 and answer.receipt.exact and not answer.receipt.degraded
    assert answer.receipt.num_draft_tokens > 0
    found = CliRunner().invoke(app, ["train-drafter", "--output", str(tmp_path / "bad"), "--feature-layers", "1"])
    assert isinstance(found.exception, InvalidConfig)


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
