"""Many short streams and many at once through Serve (K23): nothing is left behind, no item is lost or moved."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.handle_stream import HandleStream
from deployments.ingress import RouterBackend
from tests.deployments.role_doubles import application, table
from tests.doubles import make_request, plain_greedy

pytestmark = pytest.mark.ray

PROMPT = (1, 2, 3)
NUM_STREAMS, NUM_ITEMS = 64, 80


@serve.deployment(max_ongoing_requests=100, ray_actor_options={"num_cpus": 0.1})
class Numbers:
    async def count(self, stream: int) -> AsyncGenerator[bytes, None]:
        for item in range(NUM_ITEMS):
            yield f"{stream} {item}".encode()
            if item % 7 == stream % 7:
                await asyncio.sleep(0)


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Reader:
    """Reads streams as the ingress does."""

    def __init__(self, router: DeploymentHandle, numbers: DeploymentHandle) -> None:
        self._backend, self._numbers = RouterBackend(router), numbers

    async def answers(self, num_answers: int) -> list[int]:
        """Short answers, eight at a time. Returns the last one's tokens."""
        tokens: list[int] = []
        for first in range(0, num_answers, 8):
            tokens, *_ = await asyncio.gather(*(self._answer(f"{number}") for number in range(first, first + 8)))
        return tokens

    async def _answer(self, request_id: str) -> list[int]:
        request = make_request(PROMPT, max_tokens=3, request_id=request_id)
        return [token async for chunk in self._backend.generate(request, None, "exact") for token in chunk.token_ids]

    async def numbers(self) -> list[list[bytes]]:
        """All streams side by side."""
        return await asyncio.gather(*(self._read(number) for number in range(NUM_STREAMS)))

    async def _read(self, number: int) -> list[bytes]:
        stream = HandleStream(lambda: self._numbers.options(stream=True).count.remote(number))
        try:
            return [await stream.first() or b"", *[item async for item in stream.rest()]]
        finally:
            stream.close()

    def held(self) -> tuple[int, int]:
        """Objects this process refers to in Ray, and its resident memory in bytes."""
        from ray._private import worker  # this process's; Ray has no public way to count references

        gc.collect()
        counts = worker.global_worker.core_worker.get_all_reference_counts()  # type: ignore[attr-defined]
        with open("/proc/self/statm") as statm:
            return len(counts), int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def reader(serve_port: int) -> Iterator[Any]:
    yield serve.run(Reader.bind(application(max_sessions=32), Numbers.bind()), name="streams", route_prefix=None)
    serve.delete("streams")


def test_concurrent_streams_bring_all_items_in_order_and_none_twice(reader):
    expected = [[f"{stream} {item}".encode() for item in range(NUM_ITEMS)] for stream in range(NUM_STREAMS)]
    assert reader.numbers.remote().result(timeout_s=60) == expected


@pytest.mark.parametrize("num_answers", [80, pytest.param(5000, marks=pytest.mark.slow)])
def test_short_streams_leave_no_object_behind(reader, num_answers):
    assert reader.answers.remote(40).result(timeout_s=120) == plain_greedy(table(), PROMPT, 3)  # also warms up
    objects, memory = reader.held.remote().result()
    reader.answers.remote(num_answers).result(timeout_s=1200)
    more_objects, more_memory = reader.held.remote().result()
    assert more_objects - objects < num_answers / 10, "at best none: one each was the fault"
    assert more_memory - memory < 32 << 20
