"""`specdiff bench speed --through serve` for real: deployments, HTTP, embedded pair."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.ray
def test_bench_speed_through_serve():
    command = [
        sys.executable,
        "-m",
        "specdiff_dist.cli",
        "bench",
        "speed",
        "--through",
        "serve",
        "--drafter",
        "combined",
    ]
    done = subprocess.run(
        [
            *command,
            *("--num-prompts", "1", "--max-tokens", "12", "--temperature", "0", "--dtype", "float32", "--length", "3"),
            *("--threads", "1", "--json"),
        ],
        capture_output=True,
        text=True,
        timeout=400,
    )

    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    numbers = report["sets"]["builtin"]
    assert report["setting"]["through"] == "serve"
    assert report["setting"]["threads"]["here"] == 1
    assert numbers["greedy_equal"] == 1.0
    assert numbers["acceptance_length"] > 1.0
    assert all(numbers[f"speedup_vs_{name}"] > 0 for name in ("generate", "plain", "prompt_lookup"))
    assert numbers["draft_ms"] is None  # a client is not told
