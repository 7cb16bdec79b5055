"""Who is let in, who waits and for how long, who is told to come back; without Ray."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from deployments.leases import LeasedVerifier, Replicas
from deployments.messages import pack_chunk
from deployments.openai_api.admission import Admission
from deployments.openai_api.app import build_api
from specdiff_dist.config import TIERS
from specdiff_dist.errors import VerifierUnavailable
from specdiff_dist.types import TokenChunk, VerifierInfo
from tests.deployments.fake_backend import HELLO, FakeBackend, client_for, make_model
from tests.deployments.test_ingress import LAST, REQUEST, FakeHandle, RouterBackend

PATH = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 5}


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def client(backend, tmp_path):
    api = build_api(backend, make_model(tmp_path))
    api.add_middleware(Admission, max_requests=2)
    return client_for(api)


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 (there is no event to wait for)
            await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [True, False])
async def test_one_too_many_is_told_to_come_back(client, backend, stream):
    go_on = asyncio.Event()
    backend.script = [*list(HELLO)[:1], go_on.wait, *list(HELLO)[1:]]
    async with client:
        inside = [asyncio.create_task(client.post(PATH, json={**BODY, "stream": stream})) for _ in range(2)]
        await until(lambda: backend.num_open == 2)
        refused = await client.post(PATH, json=BODY)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["code"] == "service_unavailable"
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200
        go_on.set()
        assert [(await each).status_code for each in inside] == [200, 200]
        assert (await client.post(PATH, json=BODY)).status_code == 200  # their places are free again


async def test_a_request_that_fails_or_is_cancelled_gives_its_place_back(client, backend):
    async with client:
        for _ in range(3):
            assert (await client.post(PATH, json={"prompt": 5})).status_code == 400
        backend.script = [asyncio.Event().wait]
        for _ in range(3):
            task = asyncio.create_task(client.post(PATH, json=BODY))
            await until(lambda: backend.num_open == 1)
            task.cancel()
            await asyncio.wait({task})
            await until(lambda: backend.num_open == 0)
        backend.script = HELLO
        assert (await client.post(PATH, json=BODY)).status_code == 200


async def test_answers_the_router_has_no_room_for_wait_in_the_ingress():
    handle: Any = FakeHandle([pack_chunk(TokenChunk((65,), "A")), pack_chunk(LAST)])
    backend = RouterBackend(handle, max_answers=1)
    first = backend.generate(REQUEST, TIERS["fast"], "fast")
    await anext(first)
    waiting = asyncio.create_task(anext(backend.generate(REQUEST, TIERS["fast"], "fast")))
    await asyncio.sleep(0.01)
    assert len(handle.generate.args) == 1 and not waiting.done()
    await first.aclose()
    await until(lambda: len(handle.generate.args) == 2)
    waiting.cancel()


class FakeLease:
    is_given_back = False


class FakeReplicas:
    """Replicas whose next lease is granted when `grant` is set."""

    def __init__(self) -> None:
        self.last_answer_s = -float("inf")
        self.grant = asyncio.Event()
        self.lease_granted = FakeLease()

    async def lease(self, session_id: str, num_tokens: int = 0, max_tokens: int = 0) -> FakeLease:
        await self.grant.wait()
        return self.lease_granted

    def give_back(self, lease: FakeLease, *, is_lost: bool = False) -> None:
        lease.is_given_back = True

    give_up: Any = Replicas.give_up


def leased_verifier(replicas: FakeReplicas, timeout_s: float) -> LeasedVerifier:
    info = VerifierInfo("table", 10, 100, (), "float32")
    return LeasedVerifier(cast("Replicas[Any]", replicas), info, timeout_s=timeout_s)


async def enter(verifier: LeasedVerifier) -> None:
    async with verifier.placed("session"):
        pass


async def test_a_session_waits_while_others_are_answered_and_gives_up_when_nobody_is(monkeypatch):
    now = 0.0
    monkeypatch.setattr("deployments.leases.monotonic", lambda: now)
    replicas = FakeReplicas()
    waiting = asyncio.create_task(enter(leased_verifier(replicas, timeout_s=0.02)))
    for _ in range(5):  # 0.02 s of the clock that counts pass, and somebody is answered
        now += 0.02
        replicas.last_answer_s = now - 0.001
        await asyncio.sleep(0.03)
        assert not waiting.done()
    now += 0.02
    with pytest.raises(VerifierUnavailable, match=r"within 0\.02 s"):
        await waiting
    replicas.grant.set()
    await asyncio.sleep(0.01)
    assert not replicas.lease_granted.is_given_back  # the attempt was cancelled: nothing to give back


async def test_a_lease_that_comes_with_the_cancellation_is_given_back():
    replicas = FakeReplicas()
    waiting = asyncio.create_task(enter(leased_verifier(replicas, timeout_s=60)))
    await asyncio.sleep(0.01)
    replicas.grant.set()
    for _ in range(2):  # the attempt has ended, the session has not heard of it yet
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert replicas.lease_granted.is_given_back


async def test_a_session_that_ends_gives_its_place_back():
    replicas = FakeReplicas()
    replicas.grant.set()
    with pytest.raises(ZeroDivisionError):
        async with leased_verifier(replicas, timeout_s=1).placed("session"):
            raise ZeroDivisionError
    assert replicas.lease_granted.is_given_back
