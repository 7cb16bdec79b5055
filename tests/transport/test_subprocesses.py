"""A replica that starts other programs while it answers (K22): gRPC and a forked copy of its threads do not go together."""

from __future__ import annotations

import ast
import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest

from specdiff_dist.transport.channel_pool import ChannelPool
from specdiff_dist.transport.grpc_client import GrpcVerifier
from specdiff_dist.transport.grpc_server import start_verifier_server
from tests.transport.doubles import WAIT_S, Answering, statement, table_verifier, verify_call

ROOT = Path(__file__).resolve().parents[2]


def starting_a_program(reply: Any) -> Any:
    subprocess.run(["true"], check=True, timeout=WAIT_S)
    return reply


@pytest.mark.parametrize("num_calls", [200, pytest.param(5000, marks=pytest.mark.slow)])
async def test_programs_started_under_load_hang_nothing(num_calls):
    """Eight sessions at once, a program in every call."""
    server = await start_verifier_server(Answering(table_verifier(), starting_a_program))
    pool = ChannelPool()

    async def session(name: str) -> None:
        verifier = GrpcVerifier(server.address, pool=pool, deadline_s=WAIT_S)
        for round_index in range(num_calls // 8):
            await verifier.verify(verify_call(statement(session_id=name, round_index=round_index)))
        await verifier.release(name)
        await verifier.close()

    await asyncio.gather(*(session(f"{number}") for number in range(8)))
    await pool.close()
    await server.stop(0)


def forks(source: str) -> set[str]:
    """What in `source` forks this process, or may: os.fork and its kin, multiprocessing (whose default is fork), and
    `preexec_fn`, which runs Python between fork and exec."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found |= {name for name in names if name.partition(".")[0] == "multiprocessing"}
        elif isinstance(node, ast.Attribute) and node.attr in ("fork", "forkpty"):
            found.add(f"os.{node.attr}")
        elif isinstance(node, ast.keyword) and node.arg == "preexec_fn":
            found.add("preexec_fn")
    return found


def test_nothing_of_ours_forks():
    sources = [path for folder in ("specdiff_dist", "deployments") for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 50
    assert {path.name: found for path in sources if (found := forks(path.read_text()))} == {}


def test_the_scan_sees_a_fork():
    source = "import os, multiprocessing.pool\nos.fork()\nsubprocess.run('true', preexec_fn=print)"
    assert forks(source) == {"multiprocessing.pool", "os.fork", "preexec_fn"}
