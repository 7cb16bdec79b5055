"""Who holds a lease on a replica, and what its model is doing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from deployments.busy import BusyLog
from deployments.reservations import Reservations
from specdiff_dist.errors import RoleError


@dataclass(slots=True)
class LeasedSession:
    """A session and its leases: it may come back before its old lease is gone."""

    last_used: float  # monotonic
    has_place: bool = True  # False: it gave its cache back for want of room, and comes again when its leases have ended
    releases: list[asyncio.Event] = field(default_factory=list)


class OpenLeases:
    """Which sessions may hold cache here, and what the model is doing. Changed in the event loop, asked in the engine's
    thread."""

    def __init__(self, max_sessions: int | None = None, kv: Reservations | None = None) -> None:
        """`kv`: the room for their caches; None: no limit."""
        self._max_sessions = max_sessions
        self.kv = kv or Reservations()
        self._sessions: dict[str, LeasedSession] = {}
        self._loop = asyncio.get_running_loop()
        self.num_calls = 0
        self.busy_log = BusyLog()
        self.busy_since: float | None = None  # monotonic start of the running call

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, session_id: str, num_tokens: int = 0, max_tokens: int = 0) -> asyncio.Event | None:
        """Opens a lease for a session that caches `num_tokens` at once and may come to `max_tokens`; the event is set when it
        is released. None: no room at the moment; RoleError: never. With gRPC Serve never asks when all places are taken: then a lease is all that it counts,
        and waits there."""
        session = self._sessions.get(session_id)
        if session is None:
            if self._max_sessions is not None and len(self._sessions) >= self._max_sessions:
                return None
            if self.kv.max_tokens is not None and num_tokens > self.kv.max_tokens:
                raise RoleError(f"{num_tokens} tokens never fit into the room for {self.kv.max_tokens} on this replica")
            if not self.kv.place(session_id, num_tokens, max_tokens):
                return None
            session = self._sessions[session_id] = LeasedSession(monotonic())
        elif not session.has_place:
            return None
        session.releases.append(asyncio.Event())
        return session.releases[-1]

    def close(self, session_id: str, released: asyncio.Event) -> bool:
        """Whether that was the session's last lease here."""
        releases = self._sessions[session_id].releases
        releases.remove(released)
        if releases:
            return False
        del self._sessions[session_id]
        return True

    def freed(self, session_id: str) -> None:
        """The session's cache is gone; its room is others' unless it has come back meanwhile."""
        if session_id not in self._sessions:
            self.kv.free(session_id)

    def idle_s(self, session_id: str) -> float:
        """Seconds since the session's last call."""
        return monotonic() - self._sessions[session_id].last_used

    def release(self, session_id: str) -> None:
        """Lets the session's leases end by themselves. Called in the engine's thread."""
        session = self._sessions.get(session_id)
        for released in tuple(session.releases) if session is not None else ():
            self._loop.call_soon_threadsafe(released.set)

    def begin_call(self, session_id: str, unavailable: type[RoleError]) -> None:
        """Counts a call, in the engine's thread. Raises `unavailable` without a lease."""
        session = self._sessions.get(session_id)
        if session is None:
            raise unavailable("the session has no lease on this replica; lease it first")
        self.num_calls += 1
        session.last_used = monotonic()

    def has_room(self, session_id: str, num_tokens: int) -> bool:
        """Whether a leased session may now cache `num_tokens`, in the engine's thread. If not its cache must be freed, and it
        comes again."""
        if self.kv.grow(session_id, num_tokens):
            return True
        if (session := self._sessions.get(session_id)) is not None:
            session.has_place = False
        return False

    @contextmanager
    def busy(self, num_sessions: int = 1) -> Iterator[None]:
        """Around the model's work for so many sessions at once, in the engine's thread."""
        started = self.busy_since = monotonic()
        try:
            yield
        finally:
            self.busy_since = None
            self.busy_log.add(started, monotonic(), num_sessions)
