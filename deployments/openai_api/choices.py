"""Decoding the choices of one request side by side, and stopping them all when the request ends early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from deployments.openai_api.backend import Backend
from deployments.openai_api.generation import Generation
from specdiff_dist.core.logprobs import TokenLogprob
from specdiff_dist.errors import RoleError
from specdiff_dist.types import Receipt, TokenChunk

Result = TypeVar("Result")


class ClientDisconnected(Exception):
    """Nobody waits for the answer any more."""


class AnswerCutShort(RoleError):
    """The backend's stream ended without a finish_reason."""


@dataclass(slots=True)
class Choice:
    """One finished or growing answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    receipt: Receipt | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one per token, if asked for

    def add(self, chunk: TokenChunk) -> None:
        self.text += chunk.text
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.finish_reason, self.receipt = chunk.finish_reason, chunk.receipt


ChoiceStream = AsyncGenerator[tuple[int, TokenChunk], None]


async def generate_choices(backend: Backend, generation: Generation) -> ChoiceStream:
    """`(choice index, chunk)` of all choices as they come. Closing it closes every backend stream.

    Raises what the backend raises; AnswerCutShort when a stream ends without a finish_reason.
    """
    streams = [_whole(backend, generation, index) for index in range(len(generation.requests))]
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield item
        return
    # One item per choice may wait here: a slow reader slows the decoding down instead of filling memory.
    queue: asyncio.Queue[tuple[int, TokenChunk] | Exception | None] = asyncio.Queue(maxsize=len(streams))

    async def pump(stream: ChoiceStream) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put(item)
            await queue.put(None)
        except Exception as error:  # noqa: BLE001 - handed to the reader, who raises it
            await queue.put(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _whole(backend: Backend, generation: Generation, index: int) -> ChoiceStream:
    finished = False
    async with aclosing(backend.generate(generation.requests[index], generation.config, generation.tier)) as chunks:
        async for chunk in chunks:  # to the very end: what follows the last chunk is the backend's own cleaning up
            if not finished:
                yield index, chunk
            finished = finished or chunk.finish_reason is not None
    if not finished:
        raise AnswerCutShort("the answer ended without a finish_reason")


async def collect_choices(backend: Backend, generation: Generation) -> list[Choice]:
    """All choices, complete."""
    choices = [Choice() for _ in generation.requests]
    async with aclosing(generate_choices(backend, generation)) as items:
        async for index, chunk in items:
            choices[index].add(chunk)
    return choices


async def until_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client goes away (ClientDisconnected) or the caller is
    cancelled. The request's body must have been read."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
