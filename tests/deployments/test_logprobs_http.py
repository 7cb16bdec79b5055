"""Logprobs and logit processing over HTTP, through the official client and a real round loop (K09 to K12)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import openai
import pytest

from deployments.openai_api.app import build_api
from deployments.openai_api.logprobs import LOWEST, LogprobsWriter
from specdiff_dist.core.logprobs import TokenLogprob
from specdiff_dist.types import TokenChunk
from tests.deployments.fake_backend import BOS_ID, NAME, VOCAB_SIZE, FakeBackend, api_client, make_model, make_receipt
from tests.deployments.test_openai_api_client import TABLE as LOGITS
from tests.deployments.test_openai_api_client import EngineBackend, served
from tests.doubles import ScriptedDrafter, TableVerifier
from tests.plain_logits import log_softmax

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
OFF = {"quality": {"speculation": "off"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def backend(model):
    return EngineBackend(model.tokenizer)


@pytest.fixture
async def client(backend, model):
    async with served(build_api(backend, model)) as client:
        yield client


def expected_logprobs(prompt: list[int], token_ids: list[int]) -> list[Any]:
    """[tokens][vocab_size] of the table model."""
    return [log_softmax(LOGITS((*prompt, *token_ids[:at]))) for at in range(len(token_ids))]


def readable(model: Any, token_id: int) -> str:
    data = model.tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in data)


@pytest.mark.parametrize("extra", [{}, OFF, {"quality": "turbo"}], ids=["drafting", "off", "turbo"])
async def test_chat_logprobs_are_the_targets_own(client, model, extra):
    """K09 rows 49 and 51: never null, one per completion token, within 1e-3 of the target's log-softmax."""
    asked: dict[str, Any] = {
        "model": NAME, "messages": MESSAGES, "max_tokens": 30, "temperature": 0.8, "seed": 5, "logprobs": True,
        "top_logprobs": 3, "extra_body": {**extra, "return_token_ids": True, "top_k": 20},
    }  # fmt: skip
    answer = await client.chat.completions.create(**asked)
    (choice,) = answer.choices
    content = choice.logprobs.content
    token_ids = choice.model_extra["token_ids"]
    assert len(content) == len(token_ids) == answer.usage.completion_tokens == 30
    for at, values in enumerate(expected_logprobs(choice.model_extra["prompt_token_ids"], token_ids)):
        assert content[at].logprob == pytest.approx(float(values[token_ids[at]]), abs=1e-3)
        assert bytes(content[at].bytes) == model.tokenizer.token_bytes(token_ids[at])
        assert content[at].token == readable(model, token_ids[at])
        best = (-values).argsort(kind="stable")[:3]
        assert [top.logprob for top in content[at].top_logprobs] == pytest.approx(values[best].tolist(), abs=1e-3)
        assert [top.token for top in content[at].top_logprobs] == [readable(model, int(token)) for token in best]
    assert answer.choices[0].message.content == b"".join(bytes(one.bytes) for one in content).decode(errors="replace")


async def test_a_streamed_chat_has_the_same_entries_in_pieces(client):
    asked: dict[str, Any] = {
        "model": NAME, "messages": MESSAGES, "max_tokens": 30, "temperature": 0.8, "seed": 5, "logprobs": True,
        "top_logprobs": 2, "n": 2,
    }  # fmt: skip
    whole = await client.chat.completions.create(**asked)
    pieces: dict[int, list[Any]] = {0: [], 1: []}
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                pieces[choice.index].extend(choice.logprobs.content)
            assert choice.logprobs is not None or not choice.delta.content
    for choice in whole.choices:
        assert pieces[choice.index] == choice.logprobs.content
        assert len(pieces[choice.index]) == 30


async def test_the_client_accumulates_streamed_logprobs(model):
    one = TokenLogprob(-0.5, (65, 66), (-0.5, -1.5))
    script = [
        TokenChunk((72, 101), "He", logprobs=(one, one)),
        TokenChunk((108,), "l", "stop", make_receipt(), (), (one,)),
    ]
    async with (
        served(build_api(FakeBackend(script), model)) as client,
        client.chat.completions.stream(model=NAME, messages=MESSAGES, logprobs=True, top_logprobs=2) as stream,
    ):
        async for _ in stream:
            pass
        final: Any = await stream.get_final_completion()
    content = final.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == [-0.5] * 3
    assert [len(entry.top_logprobs) for entry in content] == [2] * 3


@pytest.mark.parametrize("num", [0, 2])
async def test_completion_logprobs(client, model, num):
    asked: dict[str, Any] = {
        "model": NAME, "prompt": "ab", "max_tokens": 20, "temperature": 0.9, "seed": 3, "logprobs": num,
        "extra_body": {"return_token_ids": True},
    }  # fmt: skip
    whole = await client.completions.create(**asked)
    (choice,) = whole.choices
    found = choice.logprobs
    token_ids, prompt = choice.model_extra["token_ids"], choice.model_extra["prompt_token_ids"]
    expected = expected_logprobs(prompt, token_ids)
    assert found.token_logprobs == pytest.approx(
        [float(v[t]) for v, t in zip(expected, token_ids, strict=True)], abs=1e-3
    )
    assert found.tokens == [readable(model, token) for token in token_ids]
    for name, value, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[name] == value
        assert num <= len(top) <= num + 1
    assert found.text_offset == sorted(found.text_offset)
    assert found.text_offset[0] == 0 and found.text_offset[-1] <= len(choice.text)

    streamed = [chunk.choices[0].logprobs async for chunk in await client.completions.create(**asked, stream=True)]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [value for piece in streamed if piece is not None for value in getattr(piece, field)]
        assert joined == getattr(found, field)


async def test_the_end_token_is_reported_and_text_that_is_held_back_is_too(model):
    """Text comes late where a stop string might begin; its tokens' entries come with it, none is lost."""
    one = TokenLogprob(-0.5, (65,), (-0.5,))
    script = [
        TokenChunk((72, 101), "He", logprobs=(one, one)),
        TokenChunk((108,), "", logprobs=(one,)),
        TokenChunk((111,), "lo", logprobs=(one,)),
        TokenChunk((BOS_ID,), "", "stop", make_receipt(), logprobs=(TokenLogprob(-math.inf, (65,), (-0.5,)),)),
    ]
    async with api_client(FakeBackend(script), model) as client:
        body = {"messages": MESSAGES, "logprobs": True}
        whole = (await client.post("/v1/chat/completions", json=body)).json()
        entries = whole["choices"][0]["logprobs"]["content"]
        assert len(entries) == whole["usage"]["completion_tokens"] == 5
        assert entries[-1] == {
            "token": "<s>", "bytes": [60, 115, 62], "logprob": LOWEST,
            "top_logprobs": [{"token": readable(model, 65), "bytes": list(model.tokenizer.token_bytes(65)), "logprob": -0.5}],
        }  # fmt: skip
        streamed = (await client.post("/v1/chat/completions", json=body | {"stream": True})).text
        assert streamed.count('"top_logprobs"') == 5


def test_offsets_count_characters_and_parts_of_one_have_their_bytes_for_a_name(model):
    """€ is three tokens here: its parts are named by their bytes, and stand where it stands."""
    tokenizer = model.tokenizer
    token_ids = [
        *tokenizer.encode("a€", add_special_tokens=False),
        BOS_ID,
        *tokenizer.encode("b", add_special_tokens=False),
    ]
    one = TokenLogprob(-1.0, (), ())
    writer = LogprobsWriter(tokenizer, is_chat=False)
    first, second = writer.write(token_ids[:3], [one] * 3), writer.write(token_ids[3:], [one] * 3)
    assert first is not None and second is not None
    assert first["tokens"] + second["tokens"] == ["a", "\\xe2", "\\x82", "\\xac", "<s>", "b"]
    assert first["text_offset"] + second["text_offset"] == [0, 1, 1, 1, 2, 2]
    assert writer.write([], []) is None


async def test_logprobs_are_null_unless_asked_for(client):
    answer = await client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=3)
    assert answer.choices[0].logprobs is None


# K12


async def text_of(client: Any, **fields: Any) -> str:
    asked = {"model": NAME, "messages": MESSAGES, "max_tokens": 30, "temperature": 0, **fields}
    return (await client.chat.completions.create(**asked)).choices[0].message.content


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 1.5}, {"frequency_penalty": -1.5}, {"presence_penalty": 2.0},
        {"logit_bias": {str(token): -100 for token in range(0, 200, 2)}}, {"extra_body": {"repetition_penalty": 1.3}},
        {"extra_body": {"allowed_token_ids": list(range(40, 60))}},
    ],
    ids=str,
)  # fmt: skip
async def test_every_parameter_changes_the_answer_as_it_changes_the_plain_one(client, fields):
    extra = fields.get("extra_body", {})
    drafted = await text_of(client, **fields)
    plain = await text_of(client, **{**fields, "extra_body": {**extra, **OFF}})
    assert drafted == plain
    assert drafted != await text_of(client)


async def test_min_tokens_holds_off_the_end(model):
    """Row 65: the drafter proposes the end at once, and the verifier would take it."""
    wish = 9.0 * np.eye(VOCAB_SIZE, dtype=np.float32)[BOS_ID]
    backend = EngineBackend(
        model.tokenizer,
        drafter=ScriptedDrafter(lambda prefix, n: [BOS_ID] * n, VOCAB_SIZE),
        verifier=TableVerifier(lambda prefix: LOGITS(prefix) + wish, VOCAB_SIZE, eos_token_ids=(BOS_ID,)),
    )
    async with served(build_api(backend, model)) as client:
        asked: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 30, "temperature": 0}
        short = await client.chat.completions.create(**asked)
        assert (short.usage.completion_tokens, short.choices[0].finish_reason) == (1, "stop")
        for tier in ("exact", "turbo"):
            long = await client.chat.completions.create(**asked, extra_body={"min_tokens": 10, "quality": tier})
            assert (long.usage.completion_tokens, long.choices[0].finish_reason) == (11, "stop")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**asked, extra_body={"min_tokens": 1, "allowed_token_ids": [BOS_ID]})
        assert refused.value.param == "min_tokens"
