"""Long answers in little room, through HTTP: sessions give their place back in the middle and lose nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from ray import serve

from tests.deployments.role_doubles import counters, seconds_until
from tests.deployments.tiny_service import Service, ask, ask_all, ask_alone, body_of, prompt_of, tiny_service

pytestmark = pytest.mark.ray

ROOM, STEP = 200, 8  # tokens


@pytest.fixture(scope="module", params=["grpc", "handle"])
def service(request: Any, serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("pressure")
    with tiny_service(
        folder,
        serve_port,
        f"pressure-{request.param}",
        kv_cache_tokens=ROOM,
        kv_step_tokens=STEP,
        transport=request.param,
    ) as made:
        yield made


def kv(service: Service, role: str) -> dict[str, Any]:
    return next(iter(counters(serve.get_deployment_handle(role, service.name)).values()))


def test_answers_that_do_not_fit_together_are_all_made_as_if_alone(service):
    bodies = [body_of(prompt_of(20, seed), max_tokens=120 - 10 * seed, stream=seed % 2 == 0) for seed in range(6)]
    alone = asyncio.run(ask_alone(service, bodies))
    before = kv(service, "Verifier")["kv_returns"]

    async def together() -> tuple[list[list[int]], int]:
        asking = asyncio.create_task(ask_all(service, bodies))
        most = 0
        while not asking.done():
            most = max(most, (await asyncio.to_thread(kv, service, "Verifier"))["kv_tokens_reserved"])
            await asyncio.sleep(0.01)
        return asking.result(), most

    answers, most = asyncio.run(together())
    assert answers == alone
    assert kv(service, "Verifier")["kv_returns"] > before  # there was not room for all: some were rebuilt
    assert 2 * (20 + STEP) < most <= ROOM
    assert seconds_until(lambda: kv(service, "Verifier")["kv_tokens_reserved"] == 0) < 5
    assert seconds_until(lambda: kv(service, "Drafter")["kv_tokens_reserved"] == 0) < 5
    assert service.nothing_held()


def test_without_max_tokens_an_answer_may_fill_the_room_and_keeps_no_other_one_out(service):
    async def main() -> tuple[list[int], int]:
        async with service.client() as client:
            endless = {**body_of(prompt_of(20)), "max_tokens": None}
            running = asyncio.create_task(client.post("/v1/completions", json=endless))
            short = await ask(client, body_of(prompt_of(20, 1), max_tokens=4))
            return short, (await running).json()["usage"]["total_tokens"]

    short, total = asyncio.run(main())
    assert len(short) == 4 and total == ROOM


def test_what_can_never_fit_is_told_so(service):
    async def main() -> Any:
        async with service.client() as client:
            return await client.post("/v1/completions", json=body_of(prompt_of(20), max_tokens=ROOM - 19))

    answer = asyncio.run(main())
    assert answer.status_code == 400
    assert f"maximum context length is {ROOM}" in answer.json()["error"]["message"]
