"""Fixtures that several packages' tests share."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from specdiff_dist.models import ModelFolder, resolve


@pytest.fixture(scope="session")
def embedded_model() -> ModelFolder:
    """The embedded verifier's folder. The first run on a machine fetches and converts it, about a minute."""
    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def gsm8k() -> Path:
    """GSM8K's test questions (JSON lines), from $SPECDIFF_DATA or ../shared/data beside the checkout."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    file = Path(os.environ.get("SPECDIFF_DATA", beside)) / "gsm8k" / "test.jsonl"
    if not file.is_file():
        pytest.skip(f"no GSM8K at {file}: set SPECDIFF_DATA to the folder that holds gsm8k/test.jsonl")
    return file


class Finished(NamedTuple):
    """A run of the command."""

    code: int
    out: str
    err: str


@pytest.fixture
def specdiff(monkeypatch, capsys) -> Callable[..., Finished]:
    """Runs the `specdiff` command in this process."""
    from specdiff_dist import cli

    def run(*arguments: object, stdin: str = "") -> Finished:
        monkeypatch.setattr(sys, "argv", ["specdiff", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = 0
        try:
            cli.main()
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else 0
        captured = capsys.readouterr()
        return Finished(code, captured.out, captured.err)

    return run
