"""The client's end of a Calls stream: the calls of all sessions to one service of one replica."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import count

import grpc
from google.protobuf.message import DecodeError

from specdiff_dist.pb import roles_pb2 as pb
from specdiff_dist.transport.frames import Outbox


class StreamBroken(Exception):
    """The stream ended before the answer came. `status`: what gRPC says of it, if anything."""

    def __init__(self, message: str, status: grpc.StatusCode | None = None) -> None:
        super().__init__(message)
        self.status = status


class CallStream:
    """Opens the stream at the first call, and again at the first one after it broke. Belongs to one event loop."""

    def __init__(self, channel: grpc.aio.Channel, service: str) -> None:
        """`service`: its full name."""
        self._start = channel.stream_stream(f"/{service}/Calls")  # bytes in, bytes out
        self._connection: _Connection | None = None
        self._is_closed = False

    async def call(self, method: str, request: bytes) -> pb.ReplyFrame:
        """The answer; the replica is told when the caller is cancelled. Raises StreamBroken."""
        if self._is_closed:
            raise StreamBroken("the channel is closed")
        if self._connection is None or self._connection.is_over:
            try:
                self._connection = _Connection(self._start())
            except grpc.aio.UsageError as error:
                raise StreamBroken("the channel is closed") from error
        connection = self._connection
        if method != "Info":
            return await connection.call(method, request)
        # Static facts: asked once for as long as it is certainly the same replica. Whoever asks for them in a loop must not
        # keep the reader from learning that the replica has gone.
        await asyncio.sleep(0)
        if connection.info is None or connection.info.HasField("error"):
            connection.info = await connection.call(method, request)
        return connection.info

    async def close(self) -> None:
        """Calls in flight, and later ones, raise StreamBroken."""
        self._is_closed = True
        if self._connection is not None:
            await self._connection.close()


class _Connection:
    """One stream, until it breaks."""

    def __init__(self, rpc: grpc.aio.StreamStreamCall) -> None:
        self.is_over = False
        self.info: pb.ReplyFrame | None = None
        self._rpc = rpc
        self._ids = count(1)
        self._waiting: dict[int, asyncio.Future[pb.ReplyFrame]] = {}
        self._outbox: Outbox[pb.CallFrame] = Outbox(lambda frames: pb.CallFrames(frames=frames).SerializeToString())
        self._reading = asyncio.create_task(self._read())
        self._writing = asyncio.create_task(self._write())

    async def call(self, method: str, request: bytes) -> pb.ReplyFrame:
        call_id = next(self._ids)
        future: asyncio.Future[pb.ReplyFrame] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        self._outbox.add(pb.CallFrame(call_id=call_id, method=method, request=request))
        try:
            return await future
        except asyncio.CancelledError:
            if self._waiting.pop(call_id, None) is not None:
                self._outbox.add(pb.CallFrame(call_id=call_id, is_cancelled=True))
            raise

    async def close(self) -> None:
        self._end(StreamBroken("the channel was closed during the call"))
        await asyncio.gather(self._reading, self._writing, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while isinstance(message := await self._rpc.read(), bytes):
                for frame in pb.ReplyFrames.FromString(message).frames:
                    future = self._waiting.pop(frame.call_id, None)
                    if future is not None and not future.done():
                        future.set_result(frame)
            self._end(StreamBroken("the replica ended the stream"))
        except grpc.aio.AioRpcError as error:
            self._end(StreamBroken(f"{error.code().name}: {error.details()}", error.code()))
        except DecodeError:
            self._end(StreamBroken("the replica's answer cannot be read"))
        except asyncio.CancelledError:
            self._end(StreamBroken("the channel was closed during the call"))
            raise

    async def _write(self) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader learns why
            await self._outbox.write_all(self._rpc.write)

    def _end(self, reason: StreamBroken) -> None:
        if self.is_over:
            return
        self.is_over = True
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(reason)
        self._writing.cancel()
        self._rpc.cancel()
