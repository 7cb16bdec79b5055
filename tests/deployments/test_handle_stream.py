from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any, cast

import pytest
from ray.serve.handle import DeploymentResponseGenerator

from deployments import handle_stream
from deployments.handle_stream import HandleStream


class Response:
    """A DeploymentResponseGenerator whose items the test supplies."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[Any] = asyncio.Queue()
        self.num_cancels = 0

    def __aiter__(self) -> Response:
        return self

    async def __anext__(self) -> bytes:
        item = await self.items.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def cancel(self) -> None:
        self.num_cancels += 1
        self.items.put_nowait(StopAsyncIteration())


def stream_of(*items: Any) -> tuple[HandleStream, Response]:
    response = Response()
    for item in items:
        response.items.put_nowait(item)
    return HandleStream(lambda: cast(DeploymentResponseGenerator, response)), response


async def test_items_in_order():
    stream, response = stream_of(b"1", b"2", b"3", StopAsyncIteration())
    assert await stream.first() == b"1"
    assert [item async for item in stream.rest()] == [b"2", b"3"]
    stream.close()
    assert response.num_cancels == 0  # it has ended by itself


async def test_a_call_that_is_starting_is_cancelled_once_it_has_started():
    stream, response = stream_of()
    reader = asyncio.create_task(stream.first())
    await asyncio.sleep(0)
    reader.cancel()
    stream.close()
    await asyncio.sleep(0.05)
    assert response.num_cancels == 0
    response.items.put_nowait(b"1")
    await asyncio.sleep(0.05)
    assert response.num_cancels == 1


async def test_a_call_that_runs_is_cancelled_at_once():
    stream, response = stream_of(b"1")
    await stream.first()
    stream.close()
    assert response.num_cancels == 1


async def test_a_call_that_nobody_takes_is_given_up(monkeypatch):
    monkeypatch.setattr(handle_stream, "START_PATIENCE_S", 0.05)
    stream, response = stream_of()
    stream.close()
    await asyncio.sleep(0.02)
    assert response.num_cancels == 0
    await asyncio.sleep(0.1)
    assert response.num_cancels == 1


async def test_a_failure_to_start_is_raised_or_seen_by_close():
    stream, _ = stream_of(ValueError("no replica"))
    with pytest.raises(ValueError, match="no replica"):
        await stream.first()
    unread, _ = stream_of(ValueError("no replica"))
    unread.close()
    await asyncio.sleep(0.01)  # an exception nobody retrieved would fail this test when it is collected


async def test_the_call_is_no_child_of_the_request_that_makes_it():
    request: ContextVar[str] = ContextVar("request")
    request.set("ours")
    seen = []

    def call() -> DeploymentResponseGenerator:
        seen.append(request.get("nobody's"))
        return cast(DeploymentResponseGenerator, Response())

    HandleStream(call).close()
    assert seen == ["nobody's"]


async def test_an_empty_stream_has_no_first_item():
    stream, response = stream_of(StopAsyncIteration())
    assert await stream.first() is None
    stream.close()
    assert response.num_cancels == 0
