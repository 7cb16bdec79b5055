"""What a request may say: strict types, ranges, defaults, unsupported and unknown parameters (K11, K25)."""

from __future__ import annotations

import json
import time

import pytest

from specdiff_dist.core.logit_processing import LogitProcessing
from specdiff_dist.types import SamplingParams
from tests.deployments.fake_backend import MAX_MODEL_LEN, NAME, VOCAB_SIZE, FakeBackend, api_client, make_model

OUTSIDE = (-1, VOCAB_SIZE, VOCAB_SIZE + 1, 2**31, 2**63)  # the verifier's vocabulary is padded beyond the tokenizer's
MESSAGES = [{"role": "user", "content": "Hi"}]


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


async def post(client, **fields):
    return await client.post("/v1/chat/completions", json={"model": NAME, "messages": MESSAGES, **fields})


def raw_body(**fields: str) -> bytes:
    """A chat body with fields written literally: NaN and 1e309 are no JSON that a client library would send."""
    literal = "".join(f', "{name}": {value}' for name, value in fields.items())
    return f'{{"model": "{NAME}", "messages": {json.dumps(MESSAGES)}{literal}}}'.encode()


def error_of(response, status=400):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e309", "-0.1", '"1"', "true", "[]", "101", "1" + "0" * 400]
)
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
async def test_bad_numbers_are_refused_by_name(client, backend, name, value):
    error = error_of(await client.post("/v1/chat/completions", content=raw_body(**{name: value})))
    assert error["param"] == name
    assert error["type"] == "invalid_request_error"
    assert backend.calls == []
    assert (await post(client)).status_code == 200  # alive


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e309", '"1"', "true", "1" + "0" * 400])
@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
async def test_bad_penalties_are_refused_by_name(client, backend, name, value):
    error = error_of(await client.post("/v1/chat/completions", content=raw_body(**{name: value})))
    assert error["param"] == name
    assert backend.calls == []


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e309", '"1"'])
async def test_bad_biases_are_refused_by_name(client, backend, value):
    error = error_of(await client.post("/v1/chat/completions", content=raw_body(logit_bias=f'{{"5": {value}}}')))
    assert error["param"] == "logit_bias"
    assert backend.calls == []


async def test_nan_in_a_field_nobody_knows_is_not_json(client):
    error_of(await client.post("/v1/chat/completions", content=raw_body(whatever="NaN")))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 1.0), ("n", "2"), ("n", 0), ("n", -1), ("n", 17), ("n", 129), ("n", 10**7), ("n", True),
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "5"), ("max_tokens", 10**12),
        ("max_tokens", 10**400), ("max_completion_tokens", 0),
        ("top_k", -2), ("top_k", 1.0), ("top_k", 2**70), ("top_p", 0), ("top_p", 1.01),
        ("seed", 1.5), ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", "7"),
        ("stop", ""), ("stop", [""]), ("stop", ["a", ""]), ("stop", 5), ("stop", [5]), ("stop", ["x"] * 17),
        ("stop", "x" * 1025), ("stop", {}),
        ("stop_token_ids", [-1]), ("stop_token_ids", [VOCAB_SIZE]), ("stop_token_ids", [2**31]),
        ("stop_token_ids", [2**63]), ("stop_token_ids", ["1"]), ("stop_token_ids", 5), ("stop_token_ids", [True]),
        ("stream", "yes"), ("stream", 1), ("ignore_eos", 0),
        ("model", 5),
        ("logprobs", 0), ("logprobs", "true"), ("top_logprobs", 21), ("top_logprobs", 2**31 - 1), ("top_logprobs", -1),
        ("top_logprobs", True), ("top_logprobs", 2), ("frequency_penalty", 2.01), ("frequency_penalty", "0"),
        ("presence_penalty", -2.01), ("presence_penalty", []), ("repetition_penalty", 0), ("repetition_penalty", -1.0),
        ("repetition_penalty", 1e300), ("min_p", -0.1), ("min_p", 1.01), ("min_tokens", -1), ("min_tokens", 1.0),
        ("min_tokens", 10**12), ("min_tokens", MAX_MODEL_LEN), ("min_tokens", 2**70),
        ("logit_bias", []), ("logit_bias", {"5": "1"}), ("logit_bias", {"5": True}), ("logit_bias", {"5": 100.5}),
        ("logit_bias", {"5": None}), ("logit_bias", {"a": 1}), ("logit_bias", {"05": 1}), ("logit_bias", {"5 ": 1}),
        ("logit_bias", {"": 1}), ("logit_bias", {"1" * 5000: 1}), ("logit_bias", {"5": 10**400}),
        *(("logit_bias", {str(wrong): 1}) for wrong in OUTSIDE),
        *(("allowed_token_ids", [1, wrong]) for wrong in OUTSIDE),
        ("allowed_token_ids", 5), ("allowed_token_ids", ["5"]), ("allowed_token_ids", [5.0]),
    ],
)  # fmt: skip
async def test_values_out_of_range_are_refused_by_name(client, backend, name, value):
    started = time.perf_counter()
    error = error_of(await post(client, **{name: value}))
    assert time.perf_counter() - started < 0.5  # 10^12 of anything is never built
    assert error["param"].split("[")[0] in (name, "messages")  # max_tokens over the context: OpenAI names messages
    assert backend.calls == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function"}]), ("functions", [{}]),
        ("response_format", {"type": "json_object"}), ("response_format", {"type": 5}), ("response_format", "text"),
        ("best_of", 2), ("suffix", "x"), ("echo", True), ("prompt_logprobs", 1), ("bad_words", ["x"]),
    ],
)  # fmt: skip
async def test_parameters_not_served_yet_are_refused_and_never_ignored(client, backend, name, value):
    error = error_of(await post(client, **{name: value}))
    assert error["param"] == name
    assert error["code"] == "unsupported_parameter"
    assert "not supported" in error["message"]
    assert backend.calls == []


async def test_neutral_values_of_all_parameters_are_served_without_a_warning(client, backend):
    response = await post(
        client, logprobs=False, top_logprobs=0, frequency_penalty=0, presence_penalty=0.0, repetition_penalty=1.0,
        logit_bias={}, tools=[], tool_choice="auto", response_format={"type": "text"}, best_of=1, suffix=None,
        echo=False, min_tokens=0, min_p=0, user="me", store=False, metadata=None, parallel_tool_calls=True, functions=None,
    )  # fmt: skip
    assert response.status_code == 200, response.text
    assert "x-specdiff-warning" not in response.headers
    assert (backend.last.processing, backend.last.num_logprobs) == (None, None)


async def test_best_of_is_served_when_it_changes_nothing(client):
    assert (await post(client, n=2, best_of=2)).status_code == 200
    assert error_of(await post(client, n=2, best_of=1))["param"] == "best_of"


async def test_null_means_the_default(client, backend):
    names = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "n", "stop",
             "stop_token_ids", "ignore_eos", "logprobs", "top_logprobs", "frequency_penalty", "presence_penalty",
             "repetition_penalty", "logit_bias", "min_tokens", "min_p", "allowed_token_ids", "stream", "stream_options", "quality", "return_token_ids", "model")  # fmt: skip
    assert (await post(client, **dict.fromkeys(names))).status_code == 200
    assert backend.last.sampling == SamplingParams(0.7, 5, 0.9)  # the model's own defaults
    assert backend.last.stop == ()
    assert backend.last.ignore_eos is False
    assert (backend.last.processing, backend.last.num_logprobs) == (None, None)


@pytest.mark.parametrize("value", [-1, 0])
async def test_top_k_has_two_spellings_of_off(client, backend, value):
    await post(client, top_k=value, temperature=1, top_p=1)
    assert backend.last.sampling == SamplingParams(1.0, 0, 1.0)


async def test_sampling_parameters_arrive(client, backend):
    await post(client, temperature=0, top_p=0.5, top_k=3, seed=-(2**63), max_tokens=7, stop="###", stop_token_ids=[1, 2],
               ignore_eos=True)  # fmt: skip
    request = backend.last
    assert request.sampling == SamplingParams(0.0, 3, 0.5)
    assert (request.seed, request.max_tokens, request.ignore_eos) == (-(2**63), 7, True)
    assert (request.stop, request.stop_token_ids) == (("###",), (1, 2))


async def test_what_is_done_to_logits_arrives(client, backend):
    await post(
        client, frequency_penalty=0.5, presence_penalty=-1, repetition_penalty=1.3, logit_bias={"5": 1, "0": -100},
        min_tokens=3, min_p=0.1, allowed_token_ids=[5, 7, 5], max_tokens=7,
    )  # fmt: skip
    request = backend.last
    assert request.processing == LogitProcessing(0.5, -1.0, 1.3, (5, 0), (1.0, -100.0), 3, (5, 7))
    assert request.sampling == SamplingParams(0.7, 5, 0.9, 0.1)


async def test_min_tokens_is_bounded_by_max_tokens(client):
    assert (await post(client, min_tokens=7, max_tokens=7)).status_code == 200
    assert error_of(await post(client, min_tokens=8, max_tokens=7))["param"] == "min_tokens"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 20}, 20), ({"logprobs": False}, None)],
)
async def test_logprobs_of_a_chat_arrive(client, backend, fields, expected):
    backend.script = []
    await post(client, **fields)
    assert backend.last.num_logprobs == expected


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (20, 20), (None, None), (False, None)])
async def test_logprobs_of_a_completion_arrive(client, backend, value, expected):
    backend.script = []
    await client.post("/v1/completions", json={"prompt": "Hi", "logprobs": value})
    assert backend.last.num_logprobs == expected


@pytest.mark.parametrize("value", [True, 21, -1, 1.0, "1", 2**31 - 1])
async def test_bad_logprobs_of_a_completion_are_refused(client, backend, value):
    error = error_of(await client.post("/v1/completions", json={"prompt": "Hi", "logprobs": value}))
    assert error["param"] == "logprobs"
    assert backend.calls == []


async def test_after_bad_values_of_n_the_next_request_is_served(client):
    """K11 row 60."""
    for value in (1.0, "2", 0, -1):
        error_of(await post(client, n=value))
        assert (await post(client, n=2)).status_code == 200


@pytest.mark.parametrize("value", [1e-3, 1e-30, 5e-324])
async def test_tiny_temperatures_are_served(client, backend, value):
    assert (await post(client, temperature=value)).status_code == 200
    assert backend.last.sampling.temperature == value


@pytest.mark.parametrize(("value", "expected"), [(None, ()), ([], ()), ("a", ("a",)), (["a", "b"], ("a", "b"))])
async def test_stop_forms(client, backend, value, expected):
    assert (await post(client, stop=value)).status_code == 200
    assert backend.last.stop == expected


async def test_unseeded_requests_get_different_seeds(client, backend):
    for _ in range(20):
        await post(client)
    assert len({request.seed for request, _, _ in backend.calls}) == 20
    assert len({request.request_id for request, _, _ in backend.calls}) == 20


async def test_max_tokens_and_max_completion_tokens(client, backend):
    await post(client, max_completion_tokens=5)
    assert backend.last.max_tokens == 5
    await post(client, max_completion_tokens=5, max_tokens=5)
    assert backend.last.max_tokens == 5
    assert error_of(await post(client, max_completion_tokens=5, max_tokens=6))["param"] == "max_tokens"


async def test_unknown_fields_are_ignored_with_a_warning(client):
    response = await post(client, temprature=0, **{"böse\r\nx-evil: 1": 1})
    assert response.status_code == 200
    assert response.headers["x-specdiff-warning"] == (
        "unknown field 'temprature' ignored; unknown field 'b\\xf6se\\r\\nx-evil: 1' ignored"
    )
    assert "x-evil" not in response.headers


async def test_unknown_message_and_stream_fields_are_ignored_with_a_warning(client):
    messages = [{"role": "user", "content": "Hi", "nmae": "x"}]
    options = {"include_usage": True, "chunky": 1}
    response = await post(client, messages=messages, stream=True, stream_options=options)
    assert response.status_code == 200
    warning = response.headers["x-specdiff-warning"]
    assert "'messages[0].nmae'" in warning
    assert "'stream_options.chunky'" in warning


@pytest.mark.parametrize("options", [5, "x", [], {"include_usage": 1}, {"include_usage": "true"}])
async def test_malformed_stream_options_are_refused_by_name(client, options):
    error = error_of(await post(client, stream=True, stream_options=options))
    assert error["param"].startswith("stream_options")


async def test_stream_options_need_a_stream(client):
    assert error_of(await post(client, stream_options={"include_usage": True}))["param"] == "stream_options"


@pytest.mark.parametrize(
    "name",
    ["gpt-4", "../../etc/passwd", "/etc/hosts", "http://169.254.169.254/x", "%2e%2e", "", f"{NAME}x", f" {NAME}"],
)
async def test_unknown_models_are_404_and_only_a_name(client, backend, name):
    error = error_of(await post(client, model=name), status=404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert backend.calls == []


async def test_a_request_may_leave_the_model_out(client, backend):
    response = await client.post("/v1/chat/completions", json={"messages": MESSAGES})
    assert response.status_code == 200
    assert response.json()["model"] == NAME
