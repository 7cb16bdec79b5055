"""A streaming handle call that can be closed at any moment, and that ends by nothing else.

Serve (2.60) loses about one in a thousand cancellations that arrive just while a call is being started: the caller sees
it cancelled, and the replica works on for nobody. A call that has yielded something is cancelled reliably. So methods
called this way yield a first item at once, and closing waits for it, in the background.

Ray also cancels, whenever it likes, every call that a cancelled request has made. So the call is made in a context of
its own, in which it is nobody's child.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextvars import Context
from typing import cast

from ray.serve.handle import DeploymentResponse, DeploymentResponseGenerator

START_PATIENCE_S = 1.5  # for the first item of a call that is being closed: it may be queued where there is no room


class HandleStream:
    """The items of `call`: a function that returns `handle.options(stream=True).method.remote(…)`.

    Belongs to the running event loop.
    """

    def __init__(self, call: Callable[[], DeploymentResponse | DeploymentResponseGenerator]) -> None:
        context = Context()
        self._response = cast(DeploymentResponseGenerator, context.run(call))
        self._first = asyncio.get_running_loop().create_task(self._take_first(), context=context)
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
