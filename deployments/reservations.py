"""Which sessions may cache how many tokens on a replica. No Ray, no clock of its own.

A session reserves room for what it caches at once and for `step` tokens more, and then a step at a time, so that a request
that may run to the end of the context takes no more than it comes to need. What is reserved never exceeds the room, so a
forward always finds memory. Where a step is not to be had the session gives everything back and comes again: its caller
holds all its tokens, so that it is rebuilt and none is lost.

Nobody waits for ever. Who comes is placed in the order of first asking, and who gave everything back keeps its old turn. Every
placing brings at least a step of further tokens (or the answer's end), and a session that gives back lets the others end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

STEP = 512  # tokens
WAITER_EXPIRES_S = (
    3.0  # without asking again: who waits asks every second (leases.LAST_FULL_RETRY_S), or has gone elsewhere
)


@dataclass(slots=True)
class _Place:
    turn: int  # order of first asking
    num_tokens: int  # reserved
    max_tokens: int  # that the session may ever cache


@dataclass(slots=True)
class _Waiter:
    turn: int
    num_tokens: int  # that it asks for
    asked_s: float  # the last time


class Reservations:
    """The room of one replica: `max_tokens` for all sessions together, None: no limit. Asked from any thread."""

    def __init__(
        self, max_tokens: int | None = None, *, step: int = STEP, clock: Callable[[], float] = monotonic
    ) -> None:
        self.max_tokens = max_tokens
        self.num_returns = 0  # sessions that gave everything back for want of room, so far
        self._step, self._clock = step, clock
        self._places: dict[str, _Place] = {}
        self._waiting: dict[str, _Waiter] = {}
        self._num_turns = 0
        self._lock = threading.Lock()

    @property
    def num_tokens(self) -> int:
        """Reserved at the moment."""
        with self._lock:
            return self._num_reserved()

    @property
    def num_waiting(self) -> int:
        """Sessions that asked in vain and have not gone elsewhere."""
        with self._lock:
            self._forget_the_gone()
            return len(self._waiting)

    def place(self, session_id: str, num_tokens: int, max_tokens: int) -> bool:
        """Reserves for a session that caches `num_tokens` at once and may come to cache `max_tokens`. Who is refused waits, and
        keeps its turn as long as it asks again within WAITER_EXPIRES_S."""
        with self._lock:
            if self.max_tokens is not None and num_tokens > self.max_tokens:
                return False  # can never be, and must hold nobody up
            wanted = self._wanted(num_tokens, max_tokens)
            self._forget_the_gone()
            waiter = self._waiting.get(session_id)
            turn = self._next_turn() if waiter is None else waiter.turn
            ahead = sum(other.num_tokens for other in self._waiting.values() if other.turn < turn)
            if self._num_left() < ahead + wanted:
                self._waiting[session_id] = _Waiter(turn, wanted, self._clock())
                return False
            self._waiting.pop(session_id, None)
            self._places[session_id] = _Place(turn, wanted, max_tokens)
            return True

    def grow(self, session_id: str, num_tokens: int) -> bool:
        """Whether a session that has its place may now cache `num_tokens`. If not it has no place any more: it must free its
        cache, and its turn is that of its first asking."""
        with self._lock:
            place = self._places.get(session_id)
            if place is None or num_tokens <= place.num_tokens:
                return place is not None
            room = place.num_tokens + self._num_left()
            if room < num_tokens:
                del self._places[session_id]
                self.num_returns += 1
                wanted = self._wanted(num_tokens, place.max_tokens)
                self._waiting[session_id] = _Waiter(place.turn, wanted, self._clock())
                return False
            place.num_tokens = int(min(self._wanted(num_tokens, place.max_tokens), room))
            return True

    def free(self, session_id: str) -> None:
        """The session has ended, or was never placed."""
        with self._lock:
            self._places.pop(session_id, None)

    def _wanted(self, num_tokens: int, max_tokens: int) -> int:
        """What to reserve for a session that caches so many tokens now."""
        wanted = max(min(num_tokens + self._step, max_tokens), num_tokens)
        return wanted if self.max_tokens is None else min(wanted, self.max_tokens)

    def _num_reserved(self) -> int:
        return sum(place.num_tokens for place in self._places.values())

    def _num_left(self) -> float:
        return float("inf") if self.max_tokens is None else self.max_tokens - self._num_reserved()

    def _next_turn(self) -> int:
        self._num_turns += 1
        return self._num_turns

    def _forget_the_gone(self) -> None:
        since = self._clock() - WAITER_EXPIRES_S
        self._waiting = {id: waiter for id, waiter in self._waiting.items() if waiter.asked_s >= since}
