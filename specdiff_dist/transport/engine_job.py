"""A call on its way through the engine's thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from time import perf_counter
from typing import Any

from specdiff_dist.batching import Steps, with_cost


class Job:
    """One call in steps between forwards. `future` is the caller's end; all else belongs to the thread."""

    def __init__(self, steps: Steps[Any, Any, Any], session_id: str | None) -> None:
        """Without a session it waits for no other job."""
        self.session_id = session_id
        self.future: Future[Any] = Future()
        self.part: Any = None  # what it needs forwarded next
        self.is_abandoned = False  # set by the caller: nobody waits for it any more
        self.is_done = False
        self._steps = steps
        self._submitted = perf_counter()
        self._queue_s = self._busy_s = 0.0
        self._num_forwards, self._batch_size, self._batch_tokens = 0, 1, 0

    @property
    def num_tokens(self) -> int:
        return self.part.num_tokens

    def start(self) -> None:
        """Runs it to its first forward, or to its end."""
        if not self.future.set_running_or_notify_cancel():
            self.is_done = True
            return
        self._queue_s = perf_counter() - self._submitted
        self._advance(lambda: next(self._steps))

    def go_on(self, result: Any, *, forward_s: float, batch_size: int, batch_tokens: int) -> None:
        """Gives it what came of its part, and runs it to its next forward or to its end."""
        self._busy_s += forward_s
        self._num_forwards += 1
        self._batch_size = max(self._batch_size, batch_size)
        self._batch_tokens = max(self._batch_tokens, batch_tokens)
        self._advance(lambda: self._steps.send(result))

    def fail(self, error: BaseException) -> None:
        """Tells it that the forward failed."""
        self._advance(lambda: self._steps.throw(error))

    def close_if_abandoned(self) -> bool:
        """Ends it if nobody waits for it; whether it did."""
        if self.is_abandoned and not self.is_done:
            self._steps.close()
            self._fail(RuntimeError("nobody waits for this call"))
        return self.is_done

    def _advance(self, go: Callable[[], Any]) -> None:
        started = perf_counter()
        try:
            self.part = go()
            self._busy_s += perf_counter() - started
        except StopIteration as finished:
            self._busy_s += perf_counter() - started
            self._finish(finished.value)
        except BaseException as error:  # noqa: BLE001 (raised at the caller's)
            self._fail(error)

    def _finish(self, reply: Any) -> None:
        self.is_done = True
        if reply is None:  # of a release
            self.future.set_result(None)
            return
        if self._num_forwards:
            reply = with_cost(
                reply,
                forward_s=self._busy_s,
                num_forwards=self._num_forwards,
                batch_size=self._batch_size,
                batch_tokens=self._batch_tokens,
            )
        cost = dataclasses.replace(
            reply.cost, forward_s=reply.cost.forward_s or self._busy_s, queue_s=reply.cost.queue_s + self._queue_s
        )
        self.future.set_result(dataclasses.replace(reply, cost=cost))

    def _fail(self, error: BaseException) -> None:
        self.is_done = True
        self.future.set_exception(error)  # where a caller was cancelled nobody looks at it


def whole(function: Callable[[], Any]) -> Steps[Any, Any, Any]:
    """A call that is run whole: its first step is its last."""
    return function()
    yield  # makes it a coroutine
