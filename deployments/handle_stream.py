"""A streaming handle call that can be closed at any moment.

Serve (2.60) loses about one in a thousand cancellations that arrive just while a call is being started: the caller sees
it cancelled, and the replica works on for nobody. A call that has yielded something is cancelled reliably. So methods
called this way yield a first item at once, and closing waits for it, in the background.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from ray.serve.handle import DeploymentResponseGenerator

START_PATIENCE_S = 10.0  # for the first item of a call that is being closed; nobody may be there to take it


class HandleStream:
    """The items of `handle.options(stream=True).method.remote(…)`. Belongs to the running event loop."""

    def __init__(self, response: DeploymentResponseGenerator) -> None:
        self._response = response
        self._first = asyncio.ensure_future(self._take_first())
        self._is_exhausted = False

    async def _take_first(self) -> bytes | None:
        async for item in self._response:
            return item
        self._is_exhausted = True
        return None

    async def first(self) -> bytes | None:
        """The first item, None if there is none. Cancelling this leaves the call as it is: close it."""
        return await asyncio.shield(self._first)

    async def rest(self) -> AsyncIterator[bytes]:
        """The items after the first one."""
        async for item in self._response:
            yield item
        self._is_exhausted = True

    def close(self) -> None:
        """Cancels the call unless it has ended, at once or as soon as it has started. Safe to call again."""
        if self._first.done():
            self._cancel(self._first)
        else:
            self._first.add_done_callback(self._cancel)
            asyncio.get_running_loop().call_later(START_PATIENCE_S, self._first.cancel)

    def _cancel(self, first: asyncio.Future[bytes | None]) -> None:
        if not first.cancelled():
            first.exception()  # seen: nobody else may be waiting for it
        if not self._is_exhausted:
            self._response.cancel()
