"""The Python API over table models: real round loop, real local roles, toy tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specdiff_dist.api import Pair, tokenize
from specdiff_dist.config import Lenience, Static
from specdiff_dist.core.logit_processing import LogitProcessing
from specdiff_dist.errors import InexactConfig, InvalidRequest
from specdiff_dist.types import SamplingParams
from tests.byte_model import TABLE, make_pair
from tests.doubles import plain_greedy
from tests.plain_logits import log_softmax


@pytest.fixture
def pair(tmp_path) -> Iterator[Pair]:
    with make_pair(tmp_path) as pair:
        yield pair


def test_generate_is_the_verifiers_own_greedy_text(pair):
    completion = pair.generate("hello", raw=True, max_tokens=20)

    prompt = pair.tokenizer.encode("hello", add_special_tokens=True)
    assert completion.prompt_token_ids == tuple(prompt)
    assert list(completion.token_ids) == plain_greedy(TABLE, prompt, 20)
    assert completion.text == pair.tokenizer.decode(list(completion.token_ids))
    assert completion.finish_reason == "length"
    assert completion.usage == {"prompt_tokens": 5, "completion_tokens": 20, "total_tokens": 25}
    assert completion.receipt.tier == "exact"
    assert completion.receipt.exact
    assert len(completion.rounds) == completion.receipt.num_rounds < 20  # drafts were accepted


def test_stream_and_astream_say_what_generate_says(pair):
    whole = pair.generate("hello", max_tokens=15)
    chunks = list(pair.stream("hello", max_tokens=15))

    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]

    async def collected() -> str:
        return "".join([chunk.text async for chunk in pair.astream("hello", max_tokens=15)])

    assert pair._runner.run(collected()) == whole.text


def test_leaving_a_stream_early_frees_both_sessions(pair):
    chunks = pair.stream("hello", max_tokens=100)
    next(chunks)
    assert (pair.drafter.engine.num_sessions, pair.verifier.engine.num_sessions) == (1, 1)
    chunks.close()
    assert (pair.drafter.engine.num_sessions, pair.verifier.engine.num_sessions) == (0, 0)


def test_a_text_is_a_users_message_unless_raw(pair):
    message = [{"role": "user", "content": "hi"}]

    assert tokenize(pair.tokenizer, "hi") == tokenize(pair.tokenizer, message)
    assert tokenize(pair.tokenizer, "hi", raw=True) == pair.tokenizer.encode("hi", add_special_tokens=True)
    with pytest.raises(InvalidRequest, match="raw needs a text"):
        tokenize(pair.tokenizer, message, raw=True)


def test_options_become_the_request(pair):
    request, config, tier = pair.prepare(
        "hi", tier="balanced", quality={"leniency": 0.3, "speculation": 7}, temperature=0.5, top_k=9, seed=4, stop="x"
    )

    assert tier == "balanced"
    assert config.rule == Lenience(0.3)
    assert config.policy == Static(7)
    assert request.sampling == SamplingParams(0.5, 9)
    assert (request.seed, request.stop) == (4, ("x",))
    assert request.max_tokens == 256 - len(request.prompt_token_ids)  # to the end of the context


def test_options_that_change_logits_become_the_request(pair):
    request, _, _ = pair.prepare(
        "hi", min_p=0.1, frequency_penalty=0.5, presence_penalty=-1, repetition_penalty=1.2, logit_bias={5: -3.0},
        min_tokens=4, allowed_token_ids=[5, 6, 5], logprobs=2,
    )  # fmt: skip
    assert request.processing == LogitProcessing(0.5, -1, 1.2, (5,), (-3.0,), 4, (5, 6))
    assert (request.sampling.min_p, request.num_logprobs) == (0.1, 2)
    plain, _, _ = pair.prepare("hi")
    assert (plain.processing, plain.num_logprobs) == (None, None)


def test_logprobs_are_part_of_the_completion(pair):
    completion = pair.generate("hello", raw=True, max_tokens=12, logprobs=1, frequency_penalty=1.0)
    assert len(completion.logprobs) == len(completion.token_ids) == 12
    tokens = list(completion.prompt_token_ids)
    for token, reported in zip(completion.token_ids, completion.logprobs, strict=True):
        expected = log_softmax(TABLE(tuple(tokens)))
        assert reported.logprob == pytest.approx(float(expected[token]), abs=1e-3)
        assert reported.top_token_ids == (int(expected.argmax()),)
        tokens.append(token)
    assert pair.generate("hello", max_tokens=2).logprobs == ()


def test_a_seed_is_fresh_unless_given(pair):
    first, second = (pair.prepare("hi")[0] for _ in range(2))
    assert first.seed != second.seed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tier": "best"}, "unknown quality tier 'best'"),
        ({"tier": "fast", "quality": {"tier": "high"}}, "contradict"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"max_tokens": 1000}, "maximum context length is 256"),
        ({"stop": ""}, "stop string is empty"),
        ({"logit_bias": {10**6: 1.0}}, "token ids must be in"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens must be at most max_tokens"),
    ],
)
def test_what_cannot_be_served_is_refused(pair, options, message):
    with pytest.raises(InvalidRequest, match=message):
        pair.generate("hi", **options)


def test_the_exact_tier_refuses_leniency(pair):
    with pytest.raises(InexactConfig, match="leniency 0"):
        pair.generate("hi", tier="exact", quality={"leniency": 0.1})
