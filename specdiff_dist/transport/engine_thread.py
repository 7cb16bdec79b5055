"""The one thread an engine runs in."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import TypeVar

from specdiff_dist.errors import InvalidConfig, InvalidRequest, RoleError, SpecdiffError
from specdiff_dist.types import DraftBlock, ResolvedToken, TargetRows

DEFAULT_MAX_QUEUED = 256  # calls waiting for or running in one engine

log = logging.getLogger(__name__)

ArgumentT = TypeVar("ArgumentT")
ReplyT = TypeVar("ReplyT", DraftBlock, TargetRows, ResolvedToken)


class EngineUnavailable(RoleError):
    """The engine gave no answer. The transports turn it into the role's own DrafterUnavailable or VerifierUnavailable.

    `is_busy`: too many calls were waiting, and this one was never started.
    """

    def __init__(self, message: str, *, is_busy: bool = False) -> None:
        super().__init__(message)
        self.is_busy = is_busy


class EngineThread:
    """Serialises the calls to one engine, off the event loop.

    A caller that is cancelled while its call waits takes the call with it; a call that has started always finishes, so
    an engine's sessions stay consistent whatever callers do.
    """

    def __init__(self, name: str, *, max_queued: int = DEFAULT_MAX_QUEUED) -> None:
        self._name = name
        self._max_queued = max_queued
        self._num_queued = 0
        self._lock = threading.Lock()  # of _num_queued: counted up in the loop, down in the thread
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"specdiff-{name}")

    @property
    def num_queued(self) -> int:
        """Calls that wait or run right now."""
        return self._num_queued

    async def call(self, function: Callable[[ArgumentT], ReplyT], argument: ArgumentT) -> ReplyT:
        """`function(argument)` in the thread, with `queue_s` filled in (and `forward_s`, where the engine left it 0).

        Raises what the engine raises of our own errors, EngineUnavailable for anything else and when the queue is full.
        """
        if self._num_queued >= self._max_queued:
            raise EngineUnavailable(f"{self._num_queued} calls already wait for the {self._name}", is_busy=True)
        submitted = perf_counter()

        def timed() -> ReplyT:
            started = perf_counter()
            try:
                reply = function(argument)
            except StopIteration as error:  # no future takes one: the caller would wait for ever
                raise RuntimeError("the engine raised StopIteration") from error
            cost = dataclasses.replace(
                reply.cost,
                forward_s=reply.cost.forward_s or perf_counter() - started,
                queue_s=reply.cost.queue_s + started - submitted,
            )
            return dataclasses.replace(reply, cost=cost)

        return await self._outcome(asyncio.wrap_future(self._submit(timed)))

    async def release(self, function: Callable[[str], None], session_id: str) -> None:
        """`function(session_id)` in the thread, however long the queue is and even if the caller is cancelled meanwhile.

        Never raises (cancellation apart).
        """
        try:
            await self._outcome(asyncio.shield(asyncio.wrap_future(self._submit(lambda: function(session_id)))))
        except SpecdiffError as error:
            log.warning("releasing a session of the %s failed: %s", self._name, error)

    def close(self) -> None:
        """Drops what waits; a call that runs still finishes."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _submit(self, work: Callable[[], ReplyT | None]) -> Future[ReplyT | None]:
        try:
            future = self._executor.submit(work)
        except RuntimeError as error:  # after close(), and while the interpreter shuts down
            raise EngineUnavailable(f"the {self._name} is stopped") from error
        with self._lock:
            self._num_queued += 1
        future.add_done_callback(self._count_down)
        return future

    def _count_down(self, _: Future) -> None:
        with self._lock:
            self._num_queued -= 1

    async def _outcome(self, future: asyncio.Future) -> ReplyT:
        try:
            return await future
        except (InvalidRequest, InvalidConfig, RoleError):  # what a call may raise; the rest is a failure
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Raised inside the engine, or the queue was dropped: left alone it would pass for our caller's own
            # cancellation, and a gRPC client would wait for ever.
            raise EngineUnavailable(f"the {self._name} was stopped during the call") from error
        except Exception as error:
            log.exception("the %s failed", self._name)
            raise EngineUnavailable(
                f"the {self._name} failed with {type(error).__name__}; its log says more"
            ) from error
