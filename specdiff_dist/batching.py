"""Calls whose forwards can be shared: each is a coroutine, and whoever runs several of them joins what they ask for.

An engine writes a call as if it were alone: `done = yield part` instead of calling its model. `run_alone` runs one such
call, `transport/engine_loop.py` many at once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, Protocol, TypeVar, runtime_checkable

from specdiff_dist.types import DraftBlock, DraftCall, TargetRows, VerifyCall

PartT = TypeVar("PartT")
DoneT = TypeVar("DoneT")
ReplyT = TypeVar("ReplyT")
TimedT = TypeVar("TimedT", DraftBlock, TargetRows)

# A call as a coroutine: yields what it needs forwarded, is sent what came of it, returns the reply. Whatever it raises is
# the call's own failure; a forward that fails is raised inside it.
Steps = Generator[PartT, DoneT, ReplyT]


class Part(Protocol):
    """What a call needs forwarded."""

    @property
    def num_tokens(self) -> int: ...


@runtime_checkable
class BatchingDrafter(Protocol):
    """A DrafterEngine whose calls share forwards. At most one call of a session is under way at a time."""

    def drafting(self, call: DraftCall) -> Steps[Any, Any, DraftBlock]: ...

    def forward_parts(self, parts: Sequence[Any]) -> Sequence[Any]:
        """One forward for what several calls asked for, in their order."""
        ...


@runtime_checkable
class BatchingVerifier(Protocol):
    """A VerifierEngine whose calls share forwards. At most one call of a session is under way at a time."""

    def verifying(self, call: VerifyCall) -> Steps[Any, Any, TargetRows]: ...

    def forward_parts(self, parts: Sequence[Any]) -> Sequence[Any]:
        """One forward for what several calls asked for, in their order."""
        ...


def run_alone(
    steps: Steps[PartT, DoneT, TimedT], forward_parts: Callable[[Sequence[PartT]], Sequence[DoneT]]
) -> TimedT:
    """A call that shares its forwards with none. Its reply's cost says what they took, and the call's own work."""
    started, num_forwards = perf_counter(), 0
    try:
        part = next(steps)
        while True:
            num_forwards += 1
            try:
                done = forward_parts([part])[0]
            except BaseException as error:  # noqa: BLE001 (raised where the call can see it)
                part = steps.throw(error)
            else:
                part = steps.send(done)
    except StopIteration as finished:
        return with_cost(finished.value, forward_s=perf_counter() - started, num_forwards=num_forwards)


def with_cost(
    reply: TimedT, *, forward_s: float, num_forwards: int, batch_size: int = 1, batch_tokens: int = 0
) -> TimedT:
    """`reply`, whose engine counts nothing itself."""
    cost = replace(
        reply.cost, forward_s=forward_s, num_forwards=num_forwards, batch_size=batch_size, batch_tokens=batch_tokens
    )
    return replace(reply, cost=cost)
