"""Fixtures that several packages' tests share."""

from __future__ import annotations

import io
import os
import socket
import sys
from collections.abc import Callable, Iterator
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


@pytest.fixture(scope="session")
def serve_port() -> Iterator[int]:
    """One small Ray cluster with Serve on this machine alone, for all tests marked `ray`; every module runs its own
    application on it. Yields Serve's HTTP port on 127.0.0.1."""
    import ray
    from ray import serve

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield port
        serve.shutdown()
    finally:
        ray.shutdown()


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
