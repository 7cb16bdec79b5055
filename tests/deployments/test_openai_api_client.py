"""The official `openai` client, unmodified, over real HTTP and a real round loop with table models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
import uvicorn
from fastapi import FastAPI

from deployments.openai_api.app import build_api
from deployments.openai_api.backend import ServiceInfo
from specdiff_dist.config import TIERS, DecodeConfig
from specdiff_dist.engine import decode
from specdiff_dist.transport.local import LocalDrafter, LocalVerifier
from specdiff_dist.types import GenerateRequest, TokenChunk
from tests.deployments.fake_backend import HELLO, MAX_MODEL_LEN, NAME, VOCAB_SIZE, FakeBackend, make_model
from tests.doubles import ScriptedDrafter, TableVerifier, greedy_script, random_table

TABLE = random_table(VOCAB_SIZE, seed=3, order=2)
MESSAGES: Any = [{"role": "user", "content": "Hi"}]


class EngineBackend:
    """The round loop in this process, if nothing else is given with a drafter that knows the verifier's greedy answer."""

    def __init__(self, tokenizer, *, drafter=None, verifier=None) -> None:
        self._tokenizer = tokenizer
        self._drafter = LocalDrafter(drafter or ScriptedDrafter(greedy_script(TABLE), VOCAB_SIZE))
        self.verifier_engine = verifier or TableVerifier(TABLE, VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)
        self._verifier = LocalVerifier(self.verifier_engine)

    async def info(self) -> ServiceInfo:
        verifier = await self._verifier.info()
        return ServiceInfo(verifier.max_model_len, verifier.vocab_size, await self._drafter.info())

    async def generate(
        self, request: GenerateRequest, config: DecodeConfig | None, tier: str
    ) -> AsyncGenerator[TokenChunk, None]:
        detokenizer = self._tokenizer.detokenizer(request.prompt_token_ids)
        chosen = TIERS[tier] if config is None else config
        async for chunk in decode(request, chosen, self._drafter, self._verifier, tier=tier, detokenizer=detokenizer):
            yield chunk


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def backend(model):
    return EngineBackend(model.tokenizer)


@asynccontextmanager
async def served(app: FastAPI) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    """The app behind a socket on this machine, and a client for it."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, lifespan="off", ws="none", log_config=None, http="h11")
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    while not server.started:
        assert not running.done(), "the server did not start"
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with openai.AsyncOpenAI(api_key="none", base_url=f"http://127.0.0.1:{port}/v1", max_retries=0) as client:
        yield client
    server.should_exit = True
    await running


@pytest.fixture
async def client(backend, model):
    async with served(build_api(backend, model)) as client:
        yield client


async def test_chat_whole_and_streamed_agree(client, backend):
    asked: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    whole = await client.chat.completions.create(**asked)
    assert whole.object == "chat.completion"
    (choice,) = whole.choices
    assert choice.finish_reason == "length"
    assert choice.message.role == "assistant"
    assert whole.usage.completion_tokens == 20
    assert whole.usage.prompt_tokens + 20 == whole.usage.total_tokens
    assert whole.model_extra["quality"]["exact"] is True
    assert whole.model_extra["metrics"]["speculative_decoding"]["draft_acceptance_rate"] == 1.0

    stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == choice.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].model_extra["quality"] == whole.model_extra["quality"]
    assert backend.verifier_engine.num_sessions == 0


async def test_the_client_accumulates_the_stream_to_the_whole(model):
    async with (
        served(build_api(FakeBackend(), model)) as client,
        client.chat.completions.stream(model=NAME, messages=MESSAGES) as stream,
    ):
        events = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert "content.done" in events
    assert (final.choices[0].message.content, final.choices[0].finish_reason) == ("Hello", "stop")


async def test_completions_whole_and_streamed_agree(client):
    asked: dict[str, Any] = {"model": NAME, "prompt": "ab", "max_tokens": 12, "temperature": 0.8, "seed": 7}
    whole = await client.completions.create(**asked)
    assert whole.object == "text_completion"
    chunks = [chunk async for chunk in await client.completions.create(**asked, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_every_way_to_name_the_tier(client, stream):
    async def tier_of(**fields) -> str:
        answer = await client.chat.completions.create(messages=MESSAGES, max_tokens=3, stream=stream, **fields)
        if stream:
            *_, answer = [chunk async for chunk in answer]
        return answer.model_extra["quality"]["tier"]

    assert await tier_of(model=NAME) == "exact"
    assert await tier_of(model=f"{NAME}:fast") == "fast"
    assert await tier_of(model=NAME, extra_body={"quality": "turbo"}) == "turbo"
    assert await tier_of(model=NAME, extra_body={"quality": {"tier": "high", "speculation": 2}}) == "high"
    assert await tier_of(model=NAME, extra_headers={"x-quality-tier": "balanced"}) == "balanced"


async def test_several_choices_differ_and_repeat(client):
    asked: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "n": 4, "seed": 1, "temperature": 1, "max_tokens": 16}
    first = await client.chat.completions.create(**asked)
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) > 1
    assert all(choice.finish_reason for choice in first.choices)
    again = await client.chat.completions.create(**asked)
    assert [choice.message.content for choice in again.choices] == texts
    alone = await client.chat.completions.create(**(asked | {"n": 1}))
    assert alone.choices[0].message.content == texts[0]


async def test_models(client):
    names = [model.id async for model in client.models.list()]
    assert names[0] == NAME
    assert f"{NAME}:turbo" in names
    assert (await client.models.retrieve(f"{NAME}:fast")).owned_by == "specdiff"


async def test_errors_are_the_clients_own_exceptions(client):
    with pytest.raises(openai.NotFoundError) as not_found:
        await client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="the exact tier needs leniency 0"):
        await client.chat.completions.create(model=NAME, messages=MESSAGES, extra_body={"quality": {"leniency": 0.1}})


async def test_an_error_inside_a_stream_is_an_exception_too(model):
    backend = FakeBackend([TokenChunk((65,), "A"), RuntimeError("broken")])
    async with served(build_api(backend, model)) as client:
        stream = await client.chat.completions.create(model=NAME, messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="internal error"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_frees_everything(model, stream):
    async def pause() -> None:
        await asyncio.sleep(0.01)

    backend = FakeBackend([TokenChunk((65,), "A"), pause] * 1000)
    async with served(build_api(backend, model)) as client:
        asked = client.chat.completions.create(model=NAME, messages=MESSAGES, stream=stream, n=2)
        if stream:
            answer = await asked
            await anext(aiter(answer))
            assert backend.num_open == 2
            await answer.close()
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asked, 0.2)
        hung_up = time.monotonic()
        while backend.num_open:
            assert time.monotonic() - hung_up < 2
            await asyncio.sleep(0.01)
        backend.script = HELLO
        assert (await client.completions.create(model=NAME, prompt="x")).choices[0].text == "Hello"
