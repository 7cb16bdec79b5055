"""Frames that wait for a stream: what has come while one message was on its way leaves together in the next."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from google.protobuf.message import Message

MAX_TOGETHER_BYTES = 1 << 20  # of several frames in one message; a larger frame goes alone

FrameT = TypeVar("FrameT", bound=Message)


class Outbox(Generic[FrameT]):
    """Belongs to one event loop."""

    def __init__(self, join: Callable[[Sequence[FrameT]], bytes]) -> None:
        """`join` makes a message of frames."""
        self._join = join
        self._waiting: deque[FrameT] = deque()
        self._wake = asyncio.Event()
        self._is_ended = False

    def add(self, frame: FrameT) -> None:
        self._waiting.append(frame)
        self._wake.set()

    def end(self) -> None:
        """`write_all` returns when nothing waits any more."""
        self._is_ended = True
        self._wake.set()

    async def write_all(self, write: Callable[[bytes], Awaitable[object]]) -> None:
        """Writes frames as they come, until `end`."""
        while True:
            while not self._waiting:
                if self._is_ended:
                    return
                self._wake.clear()
                await self._wake.wait()
            await write(self._join(self._next()))

    def _next(self) -> list[FrameT]:
        frames = [self._waiting.popleft()]
        num_bytes = frames[0].ByteSize()
        while self._waiting:
            num_bytes += self._waiting[0].ByteSize()
            if num_bytes > MAX_TOGETHER_BYTES:
                break
            frames.append(self._waiting.popleft())
        return frames
