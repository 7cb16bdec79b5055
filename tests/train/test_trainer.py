from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specdiff_dist.errors import InvalidConfig, ModelUnavailable
from specdiff_dist.train.checkpoint import Checkpoint
from specdiff_dist.train.schedule import Schedule, steps_that_fit
from specdiff_dist.train.trainer import TrainOptions
from tests.train import tiny_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def log_of(folder: Path, event: str) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def test_training_improves_the_evaluation_and_keeps_the_best(tmp_path):
    trained = tiny_run.train(tmp_path, num_steps=150)
    assert trained.after.score > trained.before.score + 0.1
    losses = [line["loss"] for line in log_of(tmp_path, "step")]
    assert len(losses) == trained.num_steps == 150
    assert sum(losses[-20:]) < 0.7 * sum(losses[:20])
    evaluations = log_of(tmp_path, "evaluation")
    assert [line["step"] for line in evaluations] == [0, 50, 100, 150]
    best = max(evaluations, key=lambda line: line["score"])
    assert Checkpoint.load(tmp_path / "best.safetensors").state["step"] == best["step"]  # pyright: ignore
    assert trained.after.as_json()["match"] == best["match"]
    assert torch.equal(trained.weights["mask_embedding"], load_file(tmp_path / "best.safetensors")["mask_embedding"])


def test_a_killed_run_goes_on_with_the_same_losses(tmp_path):
    steps = 400
    whole = tmp_path / "whole"
    tiny_run.train(whole, num_steps=steps)
    killed = tmp_path / "killed"
    command = [sys.executable, "-m", "tests.train.tiny_run", str(killed), str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        deadline = time.monotonic() + 120
        while not (killed / "log.jsonl").exists() or len(log_lines(killed)) < 40:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = Checkpoint.load(killed / "checkpoint.safetensors")
    assert found is not None and 0 < found.state["step"] < steps
    with (killed / "log.jsonl").open("a") as log:
        log.write('{"event": "step", "st')  # as a kill in the middle of a line leaves it
    tiny_run.train(killed, num_steps=steps)
    curves = [
        [(line["step"], line["loss"], line["norm"]) for line in log_of(folder, "step")] for folder in (whole, killed)
    ]
    assert curves[0] == curves[1] and len(curves[0]) == steps
    evaluations = [log_of(folder, "evaluation") for folder in (whole, killed)]
    assert evaluations[0] == evaluations[1]
    best = [load_file(folder / "best.safetensors") for folder in (whole, killed)]
    assert all(torch.equal(best[0][name], best[1][name]) for name in best[0])


def log_lines(folder: Path) -> list[str]:
    return (folder / "log.jsonl").read_text().splitlines()


def test_two_processes_train_one_network_on_twice_the_blocks(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [*command, "-m", "tests.train.tiny_run", str(tmp_path / "two"), "30"], cwd=ROOT, env=environment, check=True,
        timeout=120, capture_output=True,
    )  # fmt: skip
    # Alone with two batches a step the same blocks are seen in the same order; a mean of means either way.
    tiny_run.train(tmp_path / "one", num_steps=30, accumulate=2)
    one, two = ([line["norm"] for line in log_of(tmp_path / name, "step")] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-3)


def test_minutes_become_steps_that_a_checkpoint_keeps(tmp_path):
    tiny_run.train(tmp_path, minutes=0.05, num_evaluations=2)
    (length,) = log_of(tmp_path, "length")
    assert length["num_steps"] > 10
    state = Checkpoint.load(tmp_path / "checkpoint.safetensors").state  # pyright: ignore
    assert state["num_steps"] == state["step"] == length["num_steps"]
    again = tiny_run.train(tmp_path, minutes=50.0, num_evaluations=2)  # it is finished, whatever is asked for now
    assert again.num_steps == length["num_steps"]


def test_training_stops_when_evaluations_no_longer_improve(tmp_path):
    trained = tiny_run.train(tmp_path, num_steps=60, learning_rate=0.0, num_evaluations=20, patience=3)
    assert trained.stopped_early and trained.num_steps == 9


def test_other_options_are_not_mixed_into_a_checkpoint(tmp_path):
    tiny_run.train(tmp_path, num_steps=3)
    with pytest.raises(InvalidConfig, match="learning_rate"):
        tiny_run.train(tmp_path, num_steps=3, learning_rate=1e-4)
    (tmp_path / "checkpoint.safetensors").write_bytes(b"half")
    with pytest.raises(ModelUnavailable, match="delete it"):
        tiny_run.train(tmp_path, num_steps=3)


def test_accumulated_batches_make_one_step(tmp_path):
    trained = tiny_run.train(tmp_path, num_steps=4, accumulate=3)
    assert trained.num_steps == 4
    assert 4 * 3 * 2 * 2 <= trained.num_blocks <= 4 * 3 * 2 * 6


def test_the_schedule_warms_up_and_ends_at_zero():
    schedule = Schedule(num_steps=100, warmup_steps=10)
    factors = [schedule.factor(step) for step in range(101)]
    assert factors[0] == 0.1 and max(factors) == 1.0 and factors[10] == 1.0
    assert factors[100] == pytest.approx(0.0) and all(a >= b for a, b in itertools.pairwise(factors[10:]))
    assert steps_that_fit(10.0, 0.5, done=6, at_least=21) == 26
    assert steps_that_fit(-1.0, 0.5, done=6, at_least=21) == 21


def test_either_steps_or_minutes():
    for bad in (
        {},
        {"num_steps": 1, "minutes": 1.0},
        {"num_steps": 0},
        {"minutes": 0.0},
        {"num_steps": 1, "patience": 0},
    ):
        with pytest.raises(InvalidConfig):
            TrainOptions(**bad)  # pyright: ignore[reportArgumentType]
