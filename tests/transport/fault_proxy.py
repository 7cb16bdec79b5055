"""A TCP proxy between a client and a server that can hurt what passes."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class FaultProxy:
    """Forwards 127.0.0.1:port to 127.0.0.1:target_port. The faults are attributes; they may change at any time.

    delay_s: added to every chunk, either way.
    is_deaf: bytes are swallowed either way and the connections stay open, as when a network drops packets.
    reply_bytes_left: server bytes still let through (None: all); then the connection is cut in mid-message.
    """

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.delay_s = 0.0
        self.is_deaf = False
        self.reply_bytes_left: int | None = None
        self.num_connections = 0  # since the start
        self._is_closing = False
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> FaultProxy:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_closing = True
        self.cut()
        await asyncio.sleep(0.05)  # what was cut ends, what was just accepted comes to `_connected` and is refused
        self._server.close()
        await asyncio.sleep(0.05)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Resets every connection, as when the server is killed."""
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_closing:
            writer.transport.abort()
            return
        self.num_connections += 1
        ends = [writer]  # before anything is awaited: the proxy may close meanwhile
        self._writers.add(writer)
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
            ends.append(there_writer)
            self._writers.add(there_writer)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._forward(reader, there_writer, is_reply=False))
                both.create_task(self._forward(there_reader, writer, is_reply=True))
        except OSError:
            pass  # nobody is listening there: the caller sees its connection reset
        finally:
            for end in ends:
                self._writers.discard(end)
                end.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_reply: bool) -> None:
        with suppress(ConnectionError):
            while chunk := await reader.read(1 << 16):
                await asyncio.sleep(self.delay_s)
                if self.is_deaf:
                    continue
                if is_reply and self.reply_bytes_left is not None:
                    chunk = chunk[: self.reply_bytes_left]
                    self.reply_bytes_left -= len(chunk)
                writer.write(chunk)
                await writer.drain()
                if is_reply and self.reply_bytes_left == 0:
                    self.cut()
        writer.transport.abort()
