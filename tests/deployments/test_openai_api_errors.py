"""Every failure is an OpenAI error object with the right status, and says nothing it should not (K24, K25, K29, K30)."""

from __future__ import annotations

import json
import logging

import pytest

from deployments.openai_api.app import build_api
from deployments.openai_api.errors import ApiError, unavailable
from specdiff_dist.errors import (
    InexactConfig,
    InvalidConfig,
    InvalidRequest,
    InvalidRows,
    ModelUnavailable,
    SpecdiffError,
    VerifierUnavailable,
)  # fmt: skip
from specdiff_dist.types import TokenChunk
from tests.deployments.fake_backend import NAME, FakeBackend, api_client, client_for, make_model, sse_events

CANARY = "c4n4ry-pr0mpt"
BODY = {"model": NAME, "prompt": f"say {CANARY}"}


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


def error_of(response, status):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"{'a': 1}", b'{"a": 1,}', b"[]", b'"text"', b"5", b"null", b"\xff\xfe{}", b'{"prompt": "\x01"}',
        b'{"n": ' + b"1" * 5000 + b"}", b'{"a": ' + b"[" * 100_000, b"{" + b" " * 70_000,
    ],
    ids=range(13),
)  # fmt: skip
async def test_what_is_no_json_object_is_400(client, content):
    for path in ("/v1/chat/completions", "/v1/completions"):
        error = error_of(await client.post(path, content=content), 400)
        assert error["type"] == "invalid_request_error"
        assert error["code"] == "invalid_json"


async def test_routes_that_do_not_exist(client):
    for path in ("/", "/v1", "/v1/embeddings", "/v1/models/../../etc/passwd", "/v1/chat/completions/", "/%2e%2e/etc"):
        assert "etc" not in path or "root:" not in (await client.get(path)).text
        error_of(await client.get(path), 404)
    error = error_of(await client.get("/v1/completions"), 405)
    assert "Method Not Allowed" in error["message"]
    assert (await client.get("/v1/completions")).headers["allow"] == "POST"


async def test_a_body_over_the_cap_is_413_however_it_is_sent(backend, model):
    async with client_for(build_api(backend, model, max_body_bytes=1000)) as client:
        big = json.dumps({"prompt": "x" * 1000}).encode()

        async def pieces():
            for start in range(0, len(big), 100):
                yield big[start : start + 100]

        error_of(await client.post("/v1/completions", content=big), 413)
        error_of(await client.post("/v1/completions", content=pieces()), 413)  # no content-length
        error_of(await client.post("/v1/completions", content=b"{}", headers={"content-length": "9" * 30}), 413)
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200


def failures() -> list[tuple[Exception, int]]:
    return [
        (InvalidRequest("no good", param="prompt"), 400),
        (InvalidConfig("no good"), 400),
        (InexactConfig("trap 1 (order of reveal): no good", trap=1), 400),
        (VerifierUnavailable("10.0.0.7:4001 is gone"), 503),
        (unavailable("too busy"), 503),
        (ApiError(504, "too late"), 504),
        (InvalidRows("row 3 is NaN"), 500),
        (ModelUnavailable("/secret/path"), 500),
        (SpecdiffError("internal error"), 500),
        (RuntimeError(f"could not do {CANARY} in /secret/path"), 500),
        (TimeoutError(), 500),
    ]


@pytest.mark.parametrize(("failure", "status"), failures())
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_failures_before_the_first_chunk_have_a_status(client, backend, caplog, failure, status, stream, n):
    caplog.set_level(logging.DEBUG)
    backend.script = (failure,)
    response = await client.post("/v1/completions", json={**BODY, "stream": stream, "n": n})
    error = error_of(response, status)
    if status == 503:
        assert int(response.headers["retry-after"]) > 0
        assert error["type"] == "service_unavailable_error"
    assert response.headers["x-request-id"].startswith("cmpl-")
    for secret in (CANARY, "/secret/path", "10.0.0.7", "Traceback", ".py"):
        assert secret not in response.text
    assert CANARY not in caplog.text
    assert "/secret/path" not in caplog.text
    assert backend.num_open == 0


@pytest.mark.parametrize(("failure", "status"), failures())
@pytest.mark.parametrize("stream", [False, True])
async def test_failures_after_some_chunks(client, backend, caplog, failure, status, stream):
    """Not streaming: as if nothing had come. Streaming: an error event, [DONE], no finish_reason."""
    backend.script = (*[TokenChunk((65,), "A")] * 5, failure)
    for path, body in (
        ("/v1/completions", BODY),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": CANARY}]}),
    ):
        response = await client.post(path, json={**body, "stream": stream})
        if not stream:
            error_of(response, status)
            continue
        assert response.status_code == 200
        *chunks, error, done = sse_events(response.text)
        assert done == "[DONE]"
        assert list(error) == ["error"]
        assert set(error["error"]) == {"message", "type", "param", "code"}
        assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
        assert len(chunks) >= 5
        assert CANARY not in response.text
    assert CANARY not in caplog.text
    assert backend.num_open == 0


@pytest.mark.parametrize("script", [(), (TokenChunk((65,), "A"),)])
async def test_an_answer_that_just_ends_is_an_error_and_no_empty_text(client, backend, script):
    backend.script = script
    error_of(await client.post("/v1/completions", json=BODY), 500)
    response = await client.post("/v1/completions", json={**BODY, "stream": True})
    assert "internal error (AnswerCutShort)" in response.text
    assert '"finish_reason":"' not in response.text


async def test_an_unexpected_error_is_logged_with_its_place_and_id(client, backend, caplog):
    backend.script = (KeyError(CANARY),)
    response = await client.post("/v1/completions", json=BODY)
    assert "KeyError" in caplog.text
    assert "fake_backend.py" in caplog.text  # where it happened
    assert response.headers["x-request-id"] in caplog.text
    assert response.headers["x-request-id"] in response.json()["error"]["message"]


async def test_validation_errors_do_not_quote_the_prompt(client, caplog):
    caplog.set_level(logging.DEBUG)
    for body in (
        {"messages": [{"role": "user", "content": {"a": CANARY}}]},
        {"messages": CANARY},
        {"messages": [{"role": CANARY}]},
    ):
        response = await client.post("/v1/chat/completions", json=body)
        error_of(response, 400)
        assert CANARY not in response.text
    assert CANARY not in caplog.text


async def test_health_follows_the_router(client, backend):
    response = await client.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok", "model": NAME, "drafter": "toy"})
    backend.drafter = None  # slower, not ill
    assert (await client.get("/health")).json()["drafter"] is None
    backend.info_error = VerifierUnavailable("gone")
    response = await client.get("/health")
    error_of(response, 503)
    assert "retry-after" in response.headers
    response = await client.post("/v1/completions", json=BODY)
    error_of(response, 503)
    assert backend.calls == []


async def test_health_does_not_wait_for_ever(client, backend, monkeypatch):
    monkeypatch.setattr("deployments.openai_api.app.HEALTH_TIMEOUT_S", 0.05)

    async def never():
        import asyncio

        await asyncio.Event().wait()

    monkeypatch.setattr(backend, "info", never)
    error_of(await client.get("/health"), 503)


async def test_models(client, backend):
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    names = [entry["id"] for entry in listed["data"]]
    assert names == [NAME, *(f"{NAME}:{tier}" for tier in ("exact", "high", "balanced", "fast", "turbo"))]
    for entry in listed["data"]:
        assert (entry["object"], entry["owned_by"], entry["created"]) == ("model", "specdiff", 1_700_000_000)
        assert (await client.get(f"/v1/models/{entry['id']}")).json() == entry
    error_of(await client.get("/v1/models/gpt-4"), 404)
    error_of(await client.get(f"/v1/models/{NAME}:nope"), 404)
