"""Server-sent events: the chunks of a streamed answer, and a response that stops the decoding when nobody reads on.

data: {chunk}          role, then text, then per choice an empty delta with finish_reason and receipt
data: {usage chunk}    if asked for
data: {"error": …}     instead of what is missing, when the answer breaks off: no finish_reason then
data: [DONE]           always
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from deployments.openai_api.choices import Choice, ChoiceStream, wait_for_disconnect
from deployments.openai_api.errors import api_error, dump_json
from deployments.openai_api.generation import Generation
from deployments.openai_api.responses import ChunkWriter
from specdiff_dist.types import TokenChunk

DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    """One event. JSON escapes line breaks, so it is always one line."""
    return b"data: " + dump_json(value) + b"\n\n"


async def stream_events(
    generation: Generation, writer: ChunkWriter, first: tuple[int, TokenChunk], rest: ChoiceStream
) -> AsyncGenerator[bytes, None]:
    """The events of one answer. `first` was awaited before the headers went out, so that early errors have a status."""
    num_tokens = 0
    pieces = {index: Choice() for index in range(len(generation.requests))}  # not sent yet: no text came of it
    try:
        for index in pieces:
            opening = writer.start(index)
            if opening is not None:
                yield event(opening)
        async with aclosing(_chained(first, rest)) as items:
            async for index, chunk in items:
                num_tokens += len(chunk.token_ids)
                pieces[index].add(chunk)
                if chunk.text:
                    yield event(writer.text(index, pieces[index]))
                    pieces[index] = Choice()
                if chunk.finish_reason is not None:
                    yield event(writer.finish(index, chunk.finish_reason, pieces[index], chunk.receipt))
        if generation.include_usage:
            yield event(writer.usage(num_tokens))
    except Exception as error:  # noqa: BLE001 - the status is sent: the client learns of it inside the stream
        yield event(api_error(error, request_id=generation.request_id).body())
    yield DONE


async def _chained(first: tuple[int, TokenChunk], rest: ChoiceStream) -> ChoiceStream:
    yield first
    async for item in rest:
        yield item


class EventStream(StreamingResponse):
    """An ASGI response of events. However it ends, the generators behind it are closed before it returns: when all is
    sent, when the client disconnects, when the server cancels it."""

    def __init__(self, events: AsyncGenerator[bytes, None], source: ChoiceStream, headers: Mapping[str, str]) -> None:
        """`source` is what `events` reads from; it is closed even if `events` never got to start."""
        # Proxies that buffer would undo the streaming.
        fixed = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, headers={**fixed, **headers}, media_type="text/event-stream")
        self._events = events
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self.stream_response(send))
        watch = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait({sending, watch}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            watch.cancel()
            await asyncio.gather(sending, watch, return_exceptions=True)
            await self._events.aclose()
            await self._source.aclose()
