"""Prompts: forms, chat templates, the context limit, over-long and empty prompts (K13, K15, K17, K25)."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest

from tests.deployments.fake_backend import (
    BOS_ID,
    MAX_MODEL_LEN,
    NAME,
    VOCAB_SIZE,
    FakeBackend,
    api_client,
    make_model,
)  # fmt: skip

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


def ids(model, text: str) -> tuple[int, ...]:
    return tuple(model.tokenizer.encode(text, add_special_tokens=False))


async def complete(client, prompt, **fields):
    return await client.post(COMPLETIONS, json={"model": NAME, "prompt": prompt, **fields})


async def chat(client, messages, **fields):
    return await client.post(CHAT, json={"model": NAME, "messages": messages, **fields})


def error_of(response, param):
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    return error


async def test_prompt_forms(client, backend, model):
    for prompt, expected in [
        ("ab", (BOS_ID, *ids(model, "ab"))),
        (["ab"], (BOS_ID, *ids(model, "ab"))),
        ([65, 66], (65, 66)),  # ids are taken as they are: no second BOS
        ([[65, 66]], (65, 66)),
        ([VOCAB_SIZE - 1], (VOCAB_SIZE - 1,)),
    ]:
        response = await complete(client, prompt)
        assert response.status_code == 200, response.text
        assert backend.last.prompt_token_ids == expected
        assert response.json()["usage"]["prompt_tokens"] == len(expected)


@pytest.mark.parametrize(
    "prompt",
    [
        [-1], [VOCAB_SIZE], [2**31], [2**63], [1.0], [True], ["a", "b"], [[1], [2]], [1, "a"], [None], 5, {}, [], [[]],
        None, "\ud800",
    ],
)  # fmt: skip
async def test_bad_prompts_are_refused(client, backend, prompt):
    content = b'{"prompt": "\\ud800"}' if prompt == "\ud800" else None
    response = await (client.post(COMPLETIONS, content=content) if content else complete(client, prompt))
    error_of(response, "prompt")
    assert backend.calls == []


async def test_a_missing_prompt_is_refused(client):
    error_of(await client.post(COMPLETIONS, json={"model": NAME}), "prompt")


async def test_an_empty_prompt_is_served_where_the_tokenizer_adds_bos(client, backend):
    assert (await complete(client, "")).status_code == 200
    assert backend.last.prompt_token_ids == (BOS_ID,)


async def test_an_empty_prompt_is_refused_elsewhere_and_the_next_one_served(backend, tmp_path):
    async with api_client(backend, make_model(tmp_path, adds_bos=False)) as client:
        for _ in range(20):
            error_of(await complete(client, ""), "prompt")
            assert (await complete(client, "a")).status_code == 200
    assert len(backend.calls) == 20


async def test_chat_template_gives_exactly_one_bos(client, backend, model):
    response = await chat(client, [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    prompt = backend.last.prompt_token_ids
    assert prompt == (BOS_ID, *ids(model, "system: S\nuser: U\nassistant:"))
    assert response.json()["usage"]["prompt_tokens"] == len(prompt)


@pytest.mark.parametrize("stream", [False, True])
async def test_three_turns_with_content_as_string_and_as_parts(client, backend, model, stream):
    turns = ["one", "two", "three"]
    messages: list[dict] = []
    for turn in turns:
        parts = [{"type": "text", "text": turn[:2]}, {"type": "text", "text": turn[2:]}]
        messages.append({"role": "user", "content": turn if turn == "one" else parts})
        response = await chat(client, messages, stream=stream)
        assert response.status_code == 200
        # as an SDK sends its own answer back: with everything that was null
        messages.append({"role": "assistant", "content": "ok", "refusal": None, "annotations": [], "audio": None,
                         "function_call": None, "tool_calls": None})  # fmt: skip
        assert "x-specdiff-warning" not in response.headers
    text = "user: one\nassistant: ok\nuser: tw\no\nassistant: ok\nuser: th\nree\nassistant:"
    assert backend.last.prompt_token_ids == (BOS_ID, *ids(model, text))


async def test_developer_is_the_newer_name_of_system(client, backend, model):
    await chat(client, [{"role": "developer", "content": "D"}, {"role": "user", "content": ""}])
    assert backend.last.prompt_token_ids == (BOS_ID, *ids(model, "system: D\nuser: \nassistant:"))


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"), ([], "messages"), ({}, "messages"), ("hi", "messages"), ([5], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"), ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"), ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x", "tool_call_id": "1"}], "messages[0].role"),
        ([{"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
    ],
)  # fmt: skip
async def test_bad_messages_are_refused_where_they_are_wrong(client, backend, messages, param):
    error_of(await chat(client, messages), param)
    assert backend.calls == []


async def test_what_the_template_refuses_is_a_400_naming_the_role(client):
    error = error_of(await chat(client, [{"role": "assistant", "content": "x"}]), "messages")
    assert "assistant cannot begin" in error["message"]


async def test_a_model_without_template_says_where_to_go(backend, tmp_path):
    async with api_client(backend, make_model(tmp_path, chat_template=None)) as client:
        error = error_of(await chat(client, [{"role": "user", "content": "x"}]), "messages")
        assert "/v1/completions" in error["message"]
        assert (await complete(client, "x")).status_code == 200


async def test_without_max_tokens_the_answer_may_fill_the_context(client, backend):
    for num_prompt, expected in [(MAX_MODEL_LEN - 1, 1), (MAX_MODEL_LEN - 2, 2), (1, MAX_MODEL_LEN - 1)]:
        assert (await complete(client, [65] * num_prompt)).status_code == 200
        assert backend.last.max_tokens == expected
    error = error_of(await complete(client, [65] * MAX_MODEL_LEN), "prompt")
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 128 tokens" in error["message"]


async def test_prompt_and_max_tokens_must_fit_together(client, backend):
    assert (await complete(client, [65] * 100, max_tokens=28)).status_code == 200
    error = error_of(await complete(client, [65] * 100, max_tokens=29), "prompt")
    assert error["code"] == "context_length_exceeded"
    assert error["message"] == (
        "This model's maximum context length is 128 tokens. However, you requested 129 tokens (100 in the prompt, 29 in "
        "the completion). Please reduce the length of the prompt or completion."
    )
    assert len(backend.calls) == 1


class CountingTokenizer:
    """Counts the characters it had to look at."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.num_chars = 0

    def encode(self, text, *, add_special_tokens):
        self.num_chars += len(text)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids, *, skip_special_tokens=True):
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages):
        self.num_chars += sum(len(message["content"]) for message in messages)
        return self._tokenizer.apply_chat_template(messages)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("times", [2, 50, 5000])
async def test_overlong_prompts_are_refused_after_bounded_work(backend, model, endpoint, times):
    counting = CountingTokenizer(model.tokenizer)
    async with api_client(backend, dataclasses.replace(model, tokenizer=counting)) as client:
        text = "word " * (times * MAX_MODEL_LEN // 5)
        started = time.perf_counter()
        if endpoint == "chat":
            error = error_of(await chat(client, [{"role": "user", "content": text}]), "messages")
        else:
            error = error_of(await complete(client, text), "prompt")
        assert time.perf_counter() - started < 1.0
    assert error["code"] == "context_length_exceeded"
    assert text not in error["message"]
    assert counting.num_chars <= 16 * MAX_MODEL_LEN


async def test_many_overlong_messages_and_ids_are_refused_too(client):
    error_of(await chat(client, [{"role": "user", "content": ""}] * (MAX_MODEL_LEN + 1)), "messages")
    error_of(await chat(client, [{"role": "user", "content": "long " * 20}] * 2), "messages")
    error_of(await complete(client, [65] * 100_000), "prompt")


async def test_one_long_token_in_the_vocabulary_does_not_unbound_the_work(backend, model):
    class LongToken(CountingTokenizer):
        def decode(self, token_ids, *, skip_special_tokens=True):
            return "x" * 100_000

    counting = LongToken(model.tokenizer)
    async with api_client(backend, dataclasses.replace(model, tokenizer=counting)) as client:
        for text in ("word " * 100_000, "w" * 500_000):
            assert error_of(await complete(client, text), "prompt")["code"] == "context_length_exceeded"
    assert counting.num_chars <= 2 * 8 * MAX_MODEL_LEN


async def test_a_text_denser_than_the_probe_is_measured_whole(backend, tmp_path):
    """8 characters per token is only where the probe begins, not what fits."""
    model = make_model(tmp_path)

    class Dense(CountingTokenizer):
        def decode(self, token_ids, *, skip_special_tokens=True):
            return "x" * 100

        def encode(self, text, *, add_special_tokens):
            self.num_chars += len(text)
            return [65] * -(-len(text) // 100)

    dense = Dense(model.tokenizer)
    async with api_client(backend, dataclasses.replace(model, tokenizer=dense)) as client:
        assert (await complete(client, "x" * 100 * (MAX_MODEL_LEN - 1))).status_code == 200
        error_of(await complete(client, "x" * 100 * MAX_MODEL_LEN), "prompt")
        dense.num_chars = 0
        error_of(await complete(client, "x" * 101 * MAX_MODEL_LEN), "prompt")  # its length alone says so
        assert dense.num_chars == 0


async def test_tokenising_does_not_hold_up_other_requests(backend, model):
    class Slow(CountingTokenizer):
        def encode(self, text, *, add_special_tokens):
            if text == "slow":
                time.sleep(0.5)
            return super().encode(text, add_special_tokens=add_special_tokens)

    async with api_client(backend, dataclasses.replace(model, tokenizer=Slow(model.tokenizer))) as client:
        started = time.perf_counter()
        slow = asyncio.create_task(complete(client, "slow"))
        await asyncio.sleep(0.05)  # it is being tokenised now
        assert (await complete(client, "quick")).status_code == 200
        assert time.perf_counter() - started < 0.3
        assert (await slow).status_code == 200
