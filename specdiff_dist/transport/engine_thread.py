"""The way from the event loop to the one thread an engine runs in, and back."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from specdiff_dist.batching import BatchingDrafter, BatchingVerifier, Steps
from specdiff_dist.errors import InvalidConfig, InvalidRequest, RoleError, SpecdiffError
from specdiff_dist.roles import DrafterEngine, VerifierEngine
from specdiff_dist.transport.engine_job import Job, whole
from specdiff_dist.transport.engine_loop import EngineLoop, ForwardParts
from specdiff_dist.types import DraftBlock, DraftCall, ResolvedToken, TargetRows, VerifyCall

DEFAULT_MAX_QUEUED = 8192  # calls waiting for or running in one engine: two of each session where most are allowed

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
    """Runs the calls to one engine off the event loop.

    A caller that is cancelled while its call waits takes the call with it. A call that has started is only ever left
    between two forwards, so an engine's sessions stay consistent whatever callers do.
    """

    def __init__(
        self, name: str, *, forward_parts: ForwardParts | None = None, max_queued: int = DEFAULT_MAX_QUEUED
    ) -> None:
        """`forward_parts`: a batching engine's (batching.py), for `call_in_steps`."""
        self._name, self._max_queued = name, max_queued
        self._loop = EngineLoop(name, forward_parts)
        weakref.finalize(self, self._loop.close)

    @property
    def num_queued(self) -> int:
        """Calls that wait or run right now."""
        return self._loop.num_queued

    async def call(
        self, function: Callable[[ArgumentT], ReplyT], argument: ArgumentT, *, session_id: str | None = None
    ) -> ReplyT:
        """`function(argument)` in the thread, with `queue_s` filled in (and `forward_s`, where the engine left it 0).

        Raises what the engine raises of our own errors, EngineUnavailable for anything else and when the queue is full.
        """
        self._check_room()
        return await self._outcome(Job(whole(lambda: function(argument)), session_id))

    async def call_in_steps(
        self, steps: Callable[[ArgumentT], Steps[Any, Any, ReplyT]], argument: ArgumentT, *, session_id: str
    ) -> ReplyT:
        """As `call`, for a batching engine's call. `forward_s` are the forwards it took part in and its own work."""
        self._check_room()
        return await self._outcome(Job(steps(argument), session_id))

    async def release(self, function: Callable[[str], None], session_id: str) -> None:
        """`function(session_id)` in the thread, however long the queue is and even if the caller is cancelled meanwhile.

        Never raises (cancellation apart).
        """
        job = Job(whole(lambda: function(session_id)), session_id)
        try:
            await self._outcome(job, is_shielded=True)
        except SpecdiffError as error:
            log.warning("releasing a session of the %s failed: %s", self._name, error)

    def close(self) -> None:
        """Drops what waits; a call that runs still finishes."""
        self._loop.close()

    def _check_room(self) -> None:
        if self.num_queued >= self._max_queued:
            raise EngineUnavailable(f"{self.num_queued} calls already wait for the {self._name}", is_busy=True)

    async def _outcome(self, job: Job, *, is_shielded: bool = False) -> Any:
        if not self._loop.submit(job):
            raise EngineUnavailable(f"the {self._name} is stopped")
        future = asyncio.wrap_future(job.future)
        try:
            return await (asyncio.shield(future) if is_shielded else future)
        except (InvalidRequest, InvalidConfig, RoleError):  # what a call may raise; the rest is a failure
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                job.is_abandoned = not is_shielded
                raise
            # Raised inside the engine, or the queue was dropped: left alone it would pass for our caller's own
            # cancellation, and a gRPC client would wait for ever.
            raise EngineUnavailable(f"the {self._name} was stopped during the call") from error
        except Exception as error:
            log.exception("the %s failed", self._name)
            raise EngineUnavailable(
                f"the {self._name} failed with {type(error).__name__}; its log says more"
            ) from error


def drafter_thread(
    engine: DrafterEngine, *, max_queued: int = DEFAULT_MAX_QUEUED
) -> tuple[EngineThread, Callable[[DraftCall], Awaitable[DraftBlock]]]:
    """A thread for `engine`, and its `draft` there: in batches where it can."""
    if not isinstance(engine, BatchingDrafter):
        thread = EngineThread("drafter", max_queued=max_queued)
        return thread, lambda call: thread.call(engine.draft, call, session_id=call.prefix.session_id)
    thread = EngineThread("drafter", forward_parts=engine.forward_parts, max_queued=max_queued)
    return thread, lambda call: thread.call_in_steps(engine.drafting, call, session_id=call.prefix.session_id)


def verifier_thread(
    engine: VerifierEngine, *, max_queued: int = DEFAULT_MAX_QUEUED
) -> tuple[EngineThread, Callable[[VerifyCall], Awaitable[TargetRows]]]:
    """A thread for `engine`, and its `verify` there: in batches where it can."""
    if not isinstance(engine, BatchingVerifier):
        thread = EngineThread("verifier", max_queued=max_queued)
        return thread, lambda call: thread.call(engine.verify, call, session_id=call.prefix.session_id)
    thread = EngineThread("verifier", forward_parts=engine.forward_parts, max_queued=max_queued)
    return thread, lambda call: thread.call_in_steps(engine.verifying, call, session_id=call.prefix.session_id)
