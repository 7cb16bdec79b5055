"""The embedded pair through HTTP: replicas killed in the middle of an answer, clients that vanish."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from ray import serve

import deployments
from deployments.settings import AppSettings
from tests.deployments.role_doubles import counters, seconds_until

pytestmark = pytest.mark.ray

BODY: dict[str, Any] = {
    "model": "smollm2-135m",
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    "temperature": 0,
    "max_tokens": 48,
    "quality": {"tier": "exact", "speculation": 4},  # not as much as pays on this machine, which may be nothing
}


@pytest.fixture(scope="module")
def client(serve_port: int, embedded_model: object) -> Iterator[httpx.Client]:
    serve.run(deployments.app(AppSettings(dtype="float32", verifier_replicas=2)), name="pair", route_prefix="/pair")
    with httpx.Client(base_url=f"http://127.0.0.1:{serve_port}/pair/v1", timeout=120) as client:
        yield client
    serve.delete("pair")


@pytest.fixture(scope="module")
def plain_text(client: httpx.Client) -> str:
    """The verifier's own greedy answer."""
    answer = client.post("/chat/completions", json={**BODY, "quality": {"tier": "exact", "speculation": "off"}})
    return answer.json()["choices"][0]["message"]["content"]


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def kill_the_one_in_use(role: str) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for pid, values in counters(serve.get_deployment_handle(role, "pair")).items():
            if values["num_sessions"]:
                os.kill(pid, signal.SIGKILL)
                return
    raise AssertionError("no replica holds the session")


def nothing_held() -> bool:
    roles = [("Verifier", 2), ("Drafter", 1)]
    every = [values for role, n in roles for values in counters(serve.get_deployment_handle(role, "pair"), n).values()]
    return all(values["num_sessions"] == values["num_leases"] == 0 for values in every)


def test_drafted_and_plain_answers_are_the_same(client, plain_text):
    answer = client.post("/chat/completions", json=BODY).json()
    assert answer["choices"][0]["message"]["content"] == plain_text
    assert answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    assert nothing_held()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_vanishes_frees_both_caches(client, stream):
    body = {**BODY, "max_tokens": 1500, "ignore_eos": True, "stream": stream}
    if stream:
        with client.stream("POST", "/chat/completions", json=body) as response:
            next(events(response))
    else:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/chat/completions", json=body, timeout=httpx.Timeout(10, read=1.5))
    assert seconds_until(nothing_held) < 2.0


def test_clients_that_vanish_at_once_take_no_place(client, plain_text):
    body = {**BODY, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    for delay_s in (0.001, 0.002, 0.005, 0.02, 0.1) * 8:
        timeout = httpx.Timeout(10, read=delay_s)
        with suppress(httpx.ReadTimeout), client.stream("POST", "/chat/completions", json=body, timeout=timeout):
            pass  # the answer has begun already: gone, too
    assert seconds_until(nothing_held) < 5.0  # Serve lets what it has queued go after 1.5 s
    answer = client.post("/chat/completions", json=BODY).json()
    assert answer["choices"][0]["message"]["content"] == plain_text


@pytest.mark.parametrize("role", ["Drafter", "Verifier"])
def test_a_killed_replica_does_not_change_the_answer(client, plain_text, role):
    text, last = "", {}
    with client.stream("POST", "/chat/completions", json={**BODY, "stream": True}) as response:
        for index, event in enumerate(events(response)):
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
            last = event if event.get("metrics") else last
            if index == 4:
                kill_the_one_in_use(role)
    assert text == plain_text
    if role == "Drafter":
        assert last["quality"]["degraded"] is True
    else:
        assert last["quality"]["verifier_rebuilds"] == 1
