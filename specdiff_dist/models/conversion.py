"""Runs the GGUF conversion in a process of its own: it needs torch, and ours must stay light."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import specdiff_dist
from specdiff_dist.errors import ModelUnavailable

TIMEOUT_S = 1800.0


def convert_gguf(source: Path, target: Path, *, next_step: str) -> None:
    """Writes `target` from `source` (see specdiff_dist/verifiers/convert_gguf.py). Raises ModelUnavailable."""
    command = [sys.executable, "-m", "specdiff_dist.verifiers.convert_gguf", str(source), str(target)]
    environment = dict(os.environ, HF_HUB_OFFLINE="1")
    paths = [*(str(Path(path).parent) for path in specdiff_dist.__path__), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ModelUnavailable(
            f"the conversion of {source.name} took more than {TIMEOUT_S:.0f} s; try again, or {next_step}"
        ) from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"exit status {done.returncode}"
        raise ModelUnavailable(f"{source.name} could not be converted: {reason}. To go on, {next_step}")
