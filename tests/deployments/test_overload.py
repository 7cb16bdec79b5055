"""More clients than there is room for, through HTTP: whoever is let in is answered, the others are told to come back."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from tests.deployments.role_doubles import seconds_until
from tests.deployments.tiny_service import Service, ask_all, body_of, prompt_of, tiny_service

pytestmark = pytest.mark.ray

SMALL = {"max_ongoing_requests": 12, "max_sessions": 2, "lease_timeout_s": 1.0}


@pytest.fixture(scope="module", params=[SMALL, pytest.param({}, marks=pytest.mark.slow)], ids=["small", "default"])
def service(request, serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with tiny_service(tmp_path_factory.mktemp("overload"), serve_port, "overload", **request.param) as service:
        yield service
        assert seconds_until(service.nothing_held) < 5.0


def bodies(count: int, max_tokens: int = 32) -> list[dict]:
    return [body_of(prompt_of(20, index), max_tokens=max_tokens, stream=index % 2 == 0) for index in range(count)]


async def test_below_the_limit_nothing_is_lost_however_long_the_queue(service):
    """Sessions far over max_sessions wait longer than lease_timeout_s: the queue moves, so nobody gives up."""
    count = service.settings.max_ongoing_requests
    max_tokens = 300 if service.settings.max_sessions == 2 else 64  # about as long for all together
    answers = await ask_all(service, bodies(count, max_tokens))
    assert len(answers) == count and all(len(answer) == max_tokens for answer in answers)


async def test_over_the_limit_the_rest_is_told_to_come_back(service):
    limit = service.settings.max_ongoing_requests
    count = limit + limit // 4
    max_tokens = 200 if service.settings.max_sessions == 2 else 32

    async def status(client: httpx.AsyncClient, body: dict) -> tuple[int, float]:
        started = time.monotonic()
        response = await client.post("/v1/completions", json=body)
        if response.status_code == 503:
            assert int(response.headers["retry-after"]) > 0
            assert response.json()["error"]["type"] == "service_unavailable_error"
        return response.status_code, time.monotonic() - started

    async with service.client() as client:
        tasks = [asyncio.create_task(status(client, body)) for body in bodies(count, max_tokens)]
        await asyncio.sleep(1.0)
        health = await client.get("/health")
        done = await asyncio.gather(*tasks)
    counts = Counter(code for code, _ in done)
    assert counts == {200: limit, 503: count - limit}
    assert health.status_code == 200
    slowest_refusal = max(seconds for code, seconds in done if code == 503)
    assert slowest_refusal < max(seconds for code, seconds in done if code == 200) / 2  # at once, not after a wait


async def test_several_choices_wait_for_each_other_where_they_find_no_room(service):
    """n > 1 takes n places in the router; a request that needs more than there are is still answered."""
    limit = service.settings.max_ongoing_requests
    async with service.client() as client:
        body = body_of(prompt_of(5), n=16, temperature=1.0, max_tokens=4)
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=body) for _ in range(max(limit // 16, 1) + 1))
        )
    assert [len(answer.json()["choices"]) for answer in answers] == [16] * len(answers)
