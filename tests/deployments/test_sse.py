"""Streams: framing, the order of chunks, and what happens when the reader goes away (K05, K06, K18, K30)."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from deployments.openai_api.app import build_api
from specdiff_dist.types import TokenChunk
from tests.deployments.fake_backend import HELLO, NAME, FakeBackend, api_client, make_model, make_receipt, sse_events

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def backend():
    return FakeBackend()


@pytest.fixture
async def client(backend, model):
    async with api_client(backend, model) as client:
        yield client


def body_for(path: str, **fields) -> dict:
    if path == CHAT:
        return {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], **fields}
    return {"model": NAME, "prompt": "Hi", **fields}


async def stream(client, path, **fields):
    response = await client.post(path, json=body_for(path, stream=True, **fields))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    *chunks, done = sse_events(response.text)
    assert done == "[DONE]"
    return chunks


async def test_chat_chunks_in_order(client):
    chunks = await stream(client, CHAT)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)  # nobody asked
    assert [("metrics" in chunk, "quality" in chunk) for chunk in chunks] == [(False, False)] * 3 + [(True, True)]


async def test_completion_chunks_in_order(client):
    chunks = await stream(client, COMPLETIONS)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hel", "lo", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert chunks[-1]["metrics"]["speculative_decoding"]["num_spec_steps"] == 2


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize(
    "script",
    [
        [TokenChunk((65,), "A")],  # one token
        [TokenChunk((65, 66, 67), "ABC")],  # one block
        [TokenChunk((65,), "A"), TokenChunk((66,), "B")],
        [TokenChunk((2,), "")],  # nothing but EOS
        [TokenChunk((65,), ""), TokenChunk((66,), "")],
    ],
)
async def test_the_reason_comes_once_and_last_in_its_own_empty_delta(client, backend, path, reason, script):
    *before, last = script
    backend.script = [*before, TokenChunk(last.token_ids, last.text, reason, make_receipt())]
    whole = (await client.post(path, json=body_for(path))).json()
    assert whole["choices"][0]["finish_reason"] == reason
    chunks = await stream(client, path, stream_options={"include_usage": True})
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [reason]
    text = "".join(chunk.text for chunk in script)
    if path == CHAT:
        assert choices[-1]["delta"] == {}
        assert "".join(choice["delta"].get("content", "") for choice in choices) == text
        assert whole["choices"][0]["message"]["content"] == text
        texts = [choice["delta"]["content"] for choice in choices[1:-1]]
    else:
        assert choices[-1]["text"] == ""
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"] == text
        texts = [choice["text"] for choice in choices[:-1]]
    assert all(texts)  # no empty chunk in between
    num_tokens = sum(len(chunk.token_ids) for chunk in script)
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == num_tokens


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_comes_in_one_extra_chunk_when_asked_for(client, path):
    chunks = await stream(client, path, stream_options={"include_usage": True})
    *others, last = chunks
    assert last["choices"] == []
    num_prompt = last["usage"]["prompt_tokens"]
    assert num_prompt > 0
    assert last["usage"] == {"prompt_tokens": num_prompt, "completion_tokens": 5, "total_tokens": num_prompt + 5}
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in others)
    for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
        chunks = await stream(client, path, stream_options=options)
        assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


async def test_text_that_could_break_the_framing(client, backend):
    text = 'a\n\ndata: [DONE]\r\n"\\\u2028\x00é🙂'
    backend.script = [TokenChunk((1,), text, "stop", make_receipt())]
    chunks = await stream(client, COMPLETIONS)
    assert chunks[0]["choices"][0]["text"] == text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_token_ids_when_asked_for(client, path):
    whole = (await client.post(path, json=body_for(path, return_token_ids=True))).json()["choices"][0]
    assert whole["token_ids"] == [72, 101, 108, 108, 111]
    assert len(whole["prompt_token_ids"]) > 0
    chunks = await stream(client, path, return_token_ids=True)
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == whole["token_ids"]


async def test_choices_stream_side_by_side(client, backend):
    gates = [asyncio.Event() for _ in range(2)]

    async def generate(request, config, tier):
        backend.calls.append((request, config, tier))
        index = int(request.request_id.rpartition("-")[2])
        if index < 2:  # each waits for the other: one after the other would never end
            gates[index].set()
            await gates[1 - index].wait()
        for step in range(index + 1):
            yield TokenChunk((65 + index,), "abc"[index])
            await asyncio.sleep(0.001 * step)
        yield TokenChunk((), "", ("stop", "length", "stop")[index], make_receipt())

    backend.generate = generate
    chunks = await stream(client, CHAT, n=3, seed=5, stream_options={"include_usage": True})
    assert chunks[-1]["usage"]["completion_tokens"] == 1 + 2 + 3
    texts, reasons = {}, {}
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        assert choice["index"] not in reasons, "a chunk after the last one"
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"].get("content", "")
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
            assert "quality" in chunk
    assert texts == {0: "a", 1: "bb", 2: "ccc"}
    assert reasons == {0: "stop", 1: "length", 2: "stop"}
    assert len({request.seed for request, _, _ in backend.calls}) == 3


async def test_choices_of_a_whole_response(client, backend):
    backend.script = HELLO
    response = (await client.post(CHAT, json=body_for(CHAT, n=4, seed=1))).json()
    assert [choice["index"] for choice in response["choices"]] == [0, 1, 2, 3]
    assert all(choice["message"]["content"] == "Hello" for choice in response["choices"])
    assert all(choice["quality"]["tier"] == "exact" for choice in response["choices"])
    assert "quality" not in response
    assert response["usage"]["completion_tokens"] == 20
    seeds = [request.seed for request, _, _ in backend.calls]
    assert seeds[0] == 1  # n = 1 gives the same first answer
    assert len(set(seeds)) == 4
    backend.calls.clear()
    await client.post(CHAT, json=body_for(CHAT, n=4, seed=1))
    assert [request.seed for request, _, _ in backend.calls] == seeds
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


async def test_one_failing_choice_ends_the_stream_and_stops_the_others(client, backend):
    async def generate(request, config, tier):
        backend.num_open += 1
        try:
            yield TokenChunk((65,), "A")
            if request.request_id.endswith("-1"):
                raise RuntimeError("broken")
            await asyncio.Event().wait()
        finally:
            backend.num_open -= 1

    backend.generate = generate
    response = await client.post(COMPLETIONS, json=body_for(COMPLETIONS, n=3, stream=True))
    *_, error, done = sse_events(response.text)
    assert "error" in error
    assert done == "[DONE]"
    assert backend.num_open == 0


class Reader:
    """An HTTP client at the ASGI seam: reads at its own pace and hangs up when told to."""

    def __init__(self, path: str, body: dict) -> None:
        self._messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self.scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
            "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http", "headers": [],
            "client": ("test", 1), "server": ("test", 80),
        }  # fmt: skip
        self.gone = asyncio.Event()
        self.sent: list[dict] = []
        self.arrived = asyncio.Event()
        self.delay_s = 0.0

    async def receive(self) -> dict:
        if self._messages:
            return self._messages.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message) -> None:
        self.sent.append(dict(message))
        self.arrived.set()
        await asyncio.sleep(self.delay_s)


async def until(condition, timeout_s=2.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.005)


class Forever:
    """A script without an end."""

    def __iter__(self):
        async def pause() -> None:
            await asyncio.sleep(0.002)

        while True:
            yield TokenChunk((65,), "A")
            yield pause


async def blocked() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("how", ["disconnect", "cancel"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(
    ("script", "send_delay_s"),
    [
        (Forever(), 0.0),
        ([blocked], 0.0),
        ([TokenChunk((65,), "A"), blocked], 0.0),
        (Forever(), 3600.0),  # nobody reads: interrupted inside `send`
    ],
    ids=["flowing", "blocked at once", "blocked later", "unread"],
)
async def test_a_vanished_reader_stops_the_decoding(model, script, send_delay_s, streaming, n, how):
    """The backend's generators are closed by the time the request has ended, wherever it was interrupted."""
    backend = FakeBackend(script)
    reader = Reader(COMPLETIONS, body_for(COMPLETIONS, stream=streaming, n=n))
    if streaming:
        reader.delay_s = send_delay_s
    request = asyncio.create_task(build_api(backend, model)(reader.scope, reader.receive, reader.send))
    await until(lambda: backend.num_open == n)
    await asyncio.sleep(0.02)
    if how == "disconnect":
        reader.gone.set()
        await asyncio.wait_for(request, 2)
    else:
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(request, 2)
    assert backend.num_open == 0


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.002, 0.005])
@pytest.mark.parametrize("streaming", [True, False])
async def test_requests_cancelled_as_they_start_leave_nothing_open(model, streaming, delay_s):
    backend = FakeBackend(Forever())
    app = build_api(backend, model)
    for _ in range(25):
        reader = Reader(CHAT, body_for(CHAT, stream=streaming))
        request = asyncio.create_task(app(reader.scope, reader.receive, reader.send))
        await asyncio.sleep(delay_s)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        assert backend.num_open == 0


@pytest.mark.parametrize("n", [1, 4])
async def test_a_slow_reader_slows_the_decoding_down(model, n):
    backend = FakeBackend(Forever())
    reader = Reader(COMPLETIONS, body_for(COMPLETIONS, stream=True, n=n))
    reader.delay_s = 0.05
    request = asyncio.create_task(build_api(backend, model)(reader.scope, reader.receive, reader.send))
    await until(lambda: len(reader.sent) >= 6)
    assert backend.num_yielded <= len(reader.sent) + 3 * n  # bounded, not everything there is
    reader.gone.set()
    await asyncio.wait_for(request, 2)


async def test_chunks_are_sent_as_they_come(model):
    gate = asyncio.Event()
    backend = FakeBackend([TokenChunk((65,), "A"), gate.wait, TokenChunk((66,), "B", "stop", make_receipt())])
    reader = Reader(COMPLETIONS, body_for(COMPLETIONS, stream=True))
    request = asyncio.create_task(build_api(backend, model)(reader.scope, reader.receive, reader.send))
    await until(lambda: any(b'"text":"A"' in message.get("body", b"") for message in reader.sent))
    gate.set()
    await asyncio.wait_for(request, 2)
    assert reader.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
