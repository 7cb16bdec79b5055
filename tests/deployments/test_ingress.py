"""The ingress shell: what crosses the router's handle, and that it is cancelled; with and without Ray."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from ray import serve
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from deployments.ingress import Ingress, RouterBackend
from deployments.messages import GenerateCall, RouterInfo, pack_chunk, pack_error, unpack_call
from deployments.openai_api.app import build_api
from deployments.openai_api.errors import ApiError
from deployments.settings import AppSettings
from specdiff_dist.config import TIERS
from specdiff_dist.errors import InexactConfig, InvalidRequest, InvalidRows, SpecdiffError, VerifierUnavailable
from specdiff_dist.transport import envelope
from specdiff_dist.types import GenerateRequest, SamplingParams, TokenChunk, VerifierInfo
from tests.deployments.fake_backend import (
    DRAFTER,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    client_for,
    make_model,
    make_receipt,
    make_tokenizer,
    sse_events,
)  # fmt: skip

INFO = RouterInfo(
    "bytes",
    MAX_MODEL_LEN,
    VerifierInfo("bytes", VOCAB_SIZE, MAX_MODEL_LEN, (), "float32"),
    DRAFTER,
    tuple(TIERS),
    "exact",
)
REQUEST = GenerateRequest("r1", (1, 2), SamplingParams(0.5, 3, 0.9), -7, 5, ("x",), (3,), True)
TAKEN = pack_chunk(TokenChunk((), ""))  # the router's first item
LAST = TokenChunk((66,), "B", "stop", make_receipt())


class FakeItems:
    """A DeploymentResponseGenerator."""

    def __init__(self, items) -> None:
        self._items = iter(items)
        self.is_cancelled = False

    def __aiter__(self):
        return self

    async def __anext__(self) -> bytes:
        await asyncio.sleep(0)
        for item in self._items:
            if isinstance(item, Exception):
                raise item
            return item
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeResponse:
    """A DeploymentResponse."""

    def __init__(self, value) -> None:
        self._value = value
        self.is_cancelled = False

    def __await__(self):
        return self._wait().__await__()

    async def _wait(self):
        if self._value is None:
            await asyncio.Event().wait()
        if isinstance(self._value, Exception):
            raise self._value
        return self._value

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeMethod:
    def __init__(self, answer) -> None:
        self._answer = answer
        self.options_given: dict[str, Any] = {}
        self.args: list[tuple] = []

    def options(self, **options):
        self.options_given = options
        return self

    def remote(self, *args):
        self.args.append(args)
        return self._answer


class FakeHandle:
    """A DeploymentHandle to a router that answers with these items."""

    def __init__(self, items=(), info: Any = None) -> None:
        self.items = FakeItems([TAKEN, *items])
        self.response = FakeResponse(envelope.pack(INFO) if info is None else info)
        self.generate = FakeMethod(self.items)
        self.info = FakeMethod(self.response)


def backend_of(handle: Any) -> RouterBackend:
    return RouterBackend(handle)


async def test_the_call_crosses_the_handle_whole():
    handle = FakeHandle([pack_chunk(TokenChunk((65,), "A")), pack_chunk(LAST)])
    chunks = [chunk async for chunk in backend_of(handle).generate(REQUEST, TIERS["fast"], "fast")]
    assert chunks == [TokenChunk((65,), "A"), LAST]
    assert handle.generate.options_given == {"stream": True}
    ((data,),) = handle.generate.args
    assert isinstance(data, bytes)
    assert unpack_call(data) == GenerateCall(REQUEST, "fast", TIERS["fast"])
    assert not handle.items.is_cancelled  # nothing left to cancel


@pytest.mark.parametrize(
    "error",
    [InvalidRequest("no", param="prompt"), InexactConfig("trap 1", trap=1), VerifierUnavailable("gone"), InvalidRows("NaN"),
     SpecdiffError("internal error")],
)  # fmt: skip
async def test_errors_keep_their_kind(error):
    handle = FakeHandle([pack_error(error)])
    with pytest.raises(type(error), match=str(error)) as caught:
        async for _ in backend_of(handle).generate(REQUEST, None, "exact"):
            pass
    assert getattr(caught.value, "param", None) == getattr(error, "param", None)
    assert handle.items.is_cancelled


@pytest.mark.parametrize(
    "error", [BackPressureError(1, 1), DeploymentUnavailableError.__new__(DeploymentUnavailableError), ActorDiedError()]
)
async def test_nobody_there_is_503_before_and_inside_an_answer(error, tmp_path):
    for before in ([], [pack_chunk(TokenChunk((65,), "A"))]):
        async with client_for(build_api(backend_of(FakeHandle([*before, error])), make_model(tmp_path))) as client:
            response = await client.post("/v1/completions", json={"prompt": "x", "stream": True})
        if before:
            assert sse_events(response.text)[-2]["error"]["code"] == "service_unavailable"
        else:
            assert response.status_code == 503
            assert "retry-after" in response.headers
    with pytest.raises(ApiError) as caught:
        await backend_of(FakeHandle(info=error)).info()
    assert caught.value.status == 503


async def test_closing_the_generator_cancels_the_remote_one():
    handle = FakeHandle([pack_chunk(TokenChunk((65,), "A"))] * 10)
    stream = backend_of(handle).generate(REQUEST, None, "exact")
    await anext(stream)
    await stream.aclose()
    assert handle.items.is_cancelled


async def test_info_is_asked_for_with_a_deadline(monkeypatch):
    info = await backend_of(FakeHandle()).info()
    assert (info.max_model_len, info.vocab_size, info.drafter) == (MAX_MODEL_LEN, VOCAB_SIZE, DRAFTER)
    monkeypatch.setattr("deployments.ingress.INFO_TIMEOUT_S", 0.02)
    handle = FakeHandle()
    handle.response = handle.info._answer = FakeResponse(None)
    with pytest.raises(ApiError) as caught:
        await backend_of(handle).info()
    assert caught.value.status == 503
    assert handle.response.is_cancelled


async def test_requests_share_a_recent_info(tmp_path):
    handle = FakeHandle([pack_chunk(LAST)])
    async with client_for(build_api(backend_of(handle), make_model(tmp_path))) as client:
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        await client.post("/v1/completions", json={"prompt": "x"})
        assert len(handle.info.args) == 1
        await client.get("/health")
        assert len(handle.info.args) == 2  # health always asks


def write_model_folder(folder) -> None:
    """Enough of a model for the ingress: a tokenizer, a config, weights of no tensors."""
    make_tokenizer(folder, adds_bos=True)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": MAX_MODEL_LEN}))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 4}))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")


@pytest.mark.ray
def test_through_serve(tmp_path, serve_port):
    """HTTP through a real proxy and ingress replica to a stand-in for the router."""
    write_model_folder(tmp_path)
    taken, info, chunk, last = TAKEN, envelope.pack(INFO), pack_chunk(TokenChunk((65,), "A")), pack_chunk(LAST)
    refusal = pack_error(VerifierUnavailable("gone"))

    @serve.deployment(ray_actor_options={"num_cpus": 0.1})
    class Router:
        def __init__(self) -> None:
            self._num_open = 0
            self._sampling = None

        async def info(self) -> bytes:
            return info

        async def counters(self) -> tuple[int, Any]:
            return self._num_open, self._sampling

        async def generate(self, data: bytes):
            call = unpack_call(data)
            self._num_open += 1
            self._sampling = call.request.sampling
            try:
                yield taken
                if call.tier == "turbo":
                    yield refusal
                    return
                for _ in range(1000 if call.request.max_tokens > 1 else 1):
                    yield chunk
                    await asyncio.sleep(0.01)
                yield last
            finally:
                self._num_open -= 1

    settings = AppSettings(model=str(tmp_path), served_model_name="bytes")
    ingress = Ingress.options(ray_actor_options={"num_cpus": 0.1})
    try:
        serve.run(ingress.bind(Router.bind(), settings), name="ingress-test", route_prefix="/behind/a/prefix")
        router = serve.get_deployment_handle("Router", "ingress-test")
        with httpx.Client(base_url=f"http://127.0.0.1:{serve_port}/behind/a/prefix", timeout=30) as client:
            assert client.get("/health").json() == {"status": "ok", "model": "bytes", "drafter": "toy"}
            short = {"model": "bytes", "prompt": "x", "max_tokens": 1}
            whole = client.post("/v1/completions", json=short)
            assert whole.json()["choices"][0]["text"] == "AB"
            assert router.counters.remote().result()[1] == SamplingParams(0.5, 4, 1.0)  # the model's own defaults
            streamed = client.post("/v1/completions", json={**short, "stream": True})
            assert [event["choices"][0]["text"] for event in sse_events(streamed.text)[:-1]] == ["A", "B", ""]
            refused = client.post("/v1/completions", json={**short, "model": "bytes:turbo"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "service_unavailable")
            assert client.get("/nowhere").json()["error"]["type"] == "invalid_request_error"
            assert client.post("/v1/completions", content=b"{").status_code == 400

            def num_open() -> int:
                return router.counters.remote().result()[0]

            def until_open(count: int, patience_s: float = 20) -> None:  # a busy machine may start slowly
                deadline = time.monotonic() + patience_s
                while num_open() != count:
                    assert time.monotonic() < deadline, (
                        f"{num_open()}, not {count} answers being decoded after {patience_s} s"
                    )
                    time.sleep(0.02)

            endless = {"model": "bytes", "prompt": "x", "n": 2}
            with client.stream("POST", "/v1/completions", json={**endless, "stream": True}) as response:
                lines = response.iter_lines()  # kept: an iterator that is dropped closes the connection
                next(lines)
                until_open(2)
            until_open(0, patience_s=2)  # hung up
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(client.post, "/v1/completions", json=endless, timeout=1.5)
                until_open(2)
                with pytest.raises(httpx.ReadTimeout):
                    waiting.result()
            until_open(0, patience_s=2)
    finally:
        serve.delete("ingress-test")
