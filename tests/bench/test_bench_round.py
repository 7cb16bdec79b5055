"""`specdiff bench round` for real: deployments, gRPC, embedded pair."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.ray
def test_bench_round_through_serve():
    command = [sys.executable, "-m", "specdiff_dist.cli", "bench", "round"]
    done = subprocess.run(
        [*command, "--num-requests", "1", "--max-tokens", "40", "--tier", "exact", "--drafter", "diffusion", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert done.returncode == 0, done.stderr
    split = json.loads(done.stdout.splitlines()[-1])
    assert split["through"] == "serve"
    assert 1 <= split["num_rounds"] <= 40
    for name in ("draft_ms", "verify_ms", "router_ms", "wire_ms", "non_model_ms"):
        assert split[name] > 0, name
    assert split["round_ms"] > split["verify_ms"]
    assert 100 < split["bytes_per_round"] < 100_000  # sparse rows: kilobytes, not vocabularies
