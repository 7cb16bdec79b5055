"""The replica's end of Calls streams."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import grpc
from google.protobuf.message import DecodeError

from specdiff_dist.errors import InvalidRequest, SpecdiffError
from specdiff_dist.pb import roles_pb2 as pb
from specdiff_dist.transport.engine_thread import EngineUnavailable
from specdiff_dist.transport.error_detail import detail_of
from specdiff_dist.transport.frames import Outbox
from specdiff_dist.transport.role_service import Handler, answer

MAX_RUNNING = 4096  # calls of one stream; the next frames are read when some are answered


class StreamServer:
    """Answers the frames of every stream with the handlers of the unary methods."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers
        self._closing = asyncio.Event()

    def close(self) -> None:
        """Streams answer what runs, and end."""
        self._closing.set()

    async def serve(self, _: object, context: grpc.aio.ServicerContext) -> None:
        """One stream, to its end: a stream_stream handler."""
        stream = _Stream(self._handlers, context)
        reading = asyncio.create_task(stream.read())
        writing = asyncio.create_task(stream.outbox.write_all(context.write))
        closing = asyncio.create_task(self._closing.wait())
        try:
            await asyncio.wait({reading, writing, closing}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and isinstance(reading.exception(), DecodeError):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the frames cannot be read")
            if closing.done():
                stream.is_closing = True
                await stream.answered()
                stream.outbox.end()
                await writing
        finally:  # the caller is gone, or everything is said
            for task in (reading, writing, closing):
                task.cancel()
            stream.abandon()


class _Stream:
    def __init__(self, handlers: Mapping[str, Handler], context: grpc.aio.ServicerContext) -> None:
        self.outbox: Outbox[pb.ReplyFrame] = Outbox(lambda frames: pb.ReplyFrames(frames=frames).SerializeToString())
        self._handlers, self._context = handlers, context
        self._running: dict[int, asyncio.Task[None]] = {}
        self.is_closing = False  # new calls are refused

    async def read(self) -> None:
        """Starts calls as they come, until the caller ends the stream. Raises DecodeError."""
        while isinstance(message := await self._context.read(), bytes):
            for frame in pb.CallFrames.FromString(message).frames:
                if frame.is_cancelled:
                    if task := self._running.get(frame.call_id):
                        task.cancel()
                elif frame.call_id in self._running:
                    self._fail(frame.call_id, InvalidRequest(f"call {frame.call_id} already runs on this stream"))
                elif self.is_closing:
                    self._fail(frame.call_id, EngineUnavailable("the replica is stopping"))
                else:
                    self._running[frame.call_id] = asyncio.create_task(self._answer(frame))
            while len(self._running) >= MAX_RUNNING:
                await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)

    async def answered(self) -> None:
        """Until nothing runs."""
        if self._running:
            await asyncio.wait(list(self._running.values()))

    def abandon(self) -> None:
        """Nobody waits for what still runs."""
        for task in self._running.values():
            task.cancel()

    async def _answer(self, frame: pb.CallFrame) -> None:
        try:
            handler = self._handlers.get(frame.method)
            if handler is None:
                raise InvalidRequest(f"there is no method {frame.method!r}; there are {', '.join(self._handlers)}")
            self.outbox.add(pb.ReplyFrame(call_id=frame.call_id, reply=await answer(handler, frame.request)))
        except SpecdiffError as error:
            self._fail(frame.call_id, error)
        finally:
            self._running.pop(frame.call_id, None)

    def _fail(self, call_id: int, error: SpecdiffError) -> None:
        self.outbox.add(pb.ReplyFrame(call_id=call_id, error=detail_of(error)))
