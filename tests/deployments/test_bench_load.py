"""The client of `bench load`, against real HTTP with a scripted backend, and the whole command on a tiny pair."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
import uvicorn
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from deployments.bench_load import LoadClient, LoadPlan
from deployments.openai_api.app import build_api
from specdiff_dist.bench.load import OFF, ON
from specdiff_dist.errors import InvalidRequest, VerifierUnavailable
from specdiff_dist.types import TokenChunk
from tests.deployments.fake_backend import HELLO, FakeBackend, make_model, make_receipt
from tests.tiny_models import VOCAB_SIZE, save_drafter, save_verifier, tiny_llama

PLAN = LoadPlan(
    [[1, 2, 3], [4]], {"max_tokens": 5, "temperature": 0.0},
    {ON: {"tier": "exact"}, OFF: {"tier": "exact", "speculation": "off"}},
)  # fmt: skip


@asynccontextmanager
async def client_of(backend: FakeBackend, folder, patience_s: float = 20) -> AsyncIterator[LoadClient]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(build_api(backend, make_model(folder)), log_level="critical", ws="none"))
        serving = asyncio.create_task(server.serve([listening]))
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            yield LoadClient(session, PLAN, patience_s=patience_s)
        server.should_exit = True
        await serving


async def test_a_whole_answer_and_when_its_chunks_came(tmp_path):
    backend = FakeBackend([*list(HELLO)[:1], lambda: asyncio.sleep(0.05), *list(HELLO)[1:]])
    async with client_of(backend, tmp_path) as client:
        on = await client.ask(0, ON)
        await client.ask(1, OFF)
    assert on.is_whole, on.failure
    assert on.token_ids == (72, 101, 108, 108, 111)
    assert [count for _, count in on.chunks] == [3, 2]  # the held-back token comes with the text
    assert on.chunks[1][0] - on.chunks[0][0] >= 0.04
    assert on.sent_s <= on.chunks[0][0] <= on.chunks[-1][0] <= on.ended_s
    assert on.prompt == 0 and on.num_retries == 0
    (first, config, tier), (second, plain, _) = backend.calls
    assert (first.prompt_token_ids, second.prompt_token_ids) == ((1, 2, 3), (4,))
    assert tier == "exact" and config is None  # the tier as it comes
    assert plain is not None and type(plain.policy).__name__ == "Off"
    assert first.ignore_eos and first.sampling.is_greedy


async def test_told_to_come_back_it_does(tmp_path, monkeypatch):
    monkeypatch.setattr("deployments.openai_api.errors.RETRY_AFTER_S", 0.05)
    backend = FakeBackend()
    backend.script = [VerifierUnavailable("busy")]
    async with client_of(backend, tmp_path) as client:
        asking = asyncio.create_task(client.ask(0, ON))
        await asyncio.sleep(0.3)
        backend.script = HELLO
        answer = await asking
    assert answer.is_whole, answer.failure
    assert answer.num_retries >= 2
    assert answer.chunks[0][0] - answer.sent_s >= 0.25  # waiting for a place is waiting


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        ([InvalidRequest("no")], "status 400: no"),
        ([TokenChunk((72,), "H"), RuntimeError("x")], "error event: internal_error"),
        ([TokenChunk((72,), "H")], "error event: internal_error"),
        ([TokenChunk((72,), "H", "stop", make_receipt())], "1 of 5 tokens"),
        ([TokenChunk((72,), "H"), asyncio.Event().wait], "no whole answer within 0.3 s"),
    ],
)
async def test_what_is_not_whole_says_why(tmp_path, script, failure):
    async with client_of(FakeBackend(script), tmp_path, patience_s=0.3) as client:
        answer = await client.ask(0, ON)
    assert answer.failure == failure


async def test_a_service_that_is_not_there_is_a_failure():
    async with aiohttp.ClientSession("http://127.0.0.1:9") as session:
        answer = await LoadClient(session, PLAN).ask(0, ON)
    assert answer.failure is not None and answer.failure.startswith("connection")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[str, ...]:
    """Options for a random pair of two layers each, and a set of two prompts."""
    root = tmp_path_factory.mktemp("tiny")
    model = save_verifier(root / "model", tiny_llama())
    words = Tokenizer(WordLevel({f"w{index}": index for index in range(VOCAB_SIZE)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    words.save(str(model / "tokenizer.json"))
    drafter = save_drafter(root / "drafter", tiny_llama())
    lines = [{"prompt": " ".join(f"w{i * step % VOCAB_SIZE}" for i in range(12))} for step in (7, 11)]
    (root / "mine.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return (
        *("--model", str(model), "--drafter", str(drafter), "--sets", f"mine={root / 'mine.jsonl'}", "--json"),
        *("--max-tokens", "12", "--dtype", "float32", "--threads", "1"),
    )


def bench_load(*arguments: str) -> dict:
    command = [sys.executable, "-m", "specdiff_dist.cli", "bench", "load", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.ray
def test_bench_load_has_the_contracts_keys(tiny, tmp_path):
    picture = tmp_path / "load.png"
    report = bench_load(
        *tiny,
        "--concurrency",
        "1,4",
        "--rate",
        "20",
        "--repeats",
        "2",
        "--num-arrivals",
        "4",
        "--picture",
        str(picture),
    )
    contract = {"tokens_per_s", "plain_tokens_per_s", "ratio", "p50_itl_ms", "p99_itl_ms", "lost"}
    assert [point["concurrency"] for point in report["points"]] == [1, 4]
    assert [point["rate"] for point in report["poisson"]] == [20.0]
    for point in (*report["points"], *report["poisson"]):
        assert all(point[key] > 0 for key in contract - {"lost"}), point
        assert (point["lost"], point["retried"], point["different"]) == (0, 0, 0), point
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.ray
def test_the_overlap_is_measured_and_drawn(tiny, tmp_path):
    picture = tmp_path / "overlap.png"
    quality = ("--quality", '{"speculation": 4}')
    report = bench_load(*tiny, *quality, "--concurrency", "4", "--overlap-picture", str(picture))
    assert report["lost"] == 0
    assert report["drafter_busy_s"] > 0 and report["verifier_busy_s"] > 0
    busy_s = report["drafter_busy_s"] + report["verifier_busy_s"]
    assert report["overlap"] == pytest.approx(busy_s / report["wall_s"])
    assert 0 < busy_s <= 2 * report["wall_s"]
    assert picture.read_bytes().startswith(b"\x89PNG")
