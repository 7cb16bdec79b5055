"""What verifier and drafter replicas share: an engine, open to sessions that hold a lease.

A lease is a streaming Serve call that stays open for the session (README, Leases). Whatever ends it frees the
session's cache: the caller releases the session, or cancels the stream, or dies. The last needs `CallerWatch`: Ray keeps
a stream running whose caller was killed. A release lets the stream end by itself, because Serve counts a cancelled one
as an error.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from time import monotonic
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError
from ray.serve.metrics import Gauge

from deployments.busy import BusyInterval
from deployments.endpoints import Endpoint
from deployments.messages import LeaseGrant
from deployments.open_leases import OpenLeases
from specdiff_dist.batching import BatchingDrafter, BatchingVerifier, Steps, run_alone
from specdiff_dist.errors import DrafterUnavailable, VerifierUnavailable
from specdiff_dist.roles import DrafterEngine, VerifierEngine
from specdiff_dist.transport import envelope
from specdiff_dist.types import (
    DraftBlock,
    DraftCall,
    DrafterInfo,
    ResolveCall,
    ResolvedToken,
    TargetRows,
    VerifierInfo,
    VerifyCall,
)

NO_LIMIT = -1  # as number of tokens
GAUGES = {  # per replica, under specdiff_…
    "kv_tokens_reserved": "Tokens that sessions may cache without asking again.",
    "kv_tokens_total": "Tokens that all sessions may cache together; -1: no limit.",
    "kv_waiting": "Sessions that wait for room.",
    "kv_returns": "Sessions so far that gave their cache back for want of room and were rebuilt.",
}
CALLER_POLL_S = 1.0  # a dead caller is noticed this late
NO_ROOM = "no room to cache more of this session: it goes on when others have ended"
IDLE_LEASE_S = 300.0  # a lease without calls ends: a cancellation that got lost does not hold its place for ever


class GuardedVerifier:
    """A VerifierEngine that serves leased sessions only: a call that arrives after its lease ended leaves no cache."""

    def __init__(self, engine: VerifierEngine, leases: OpenLeases) -> None:
        self._engine, self._leases = engine, leases

    @property
    def info(self) -> VerifierInfo:
        return self._engine.info

    @property
    def num_sessions(self) -> int:
        return self._engine.num_sessions

    def verify(self, call: VerifyCall) -> TargetRows:
        """Raises VerifierUnavailable without a lease."""
        return run_alone(self.verifying(call), self.forward_parts)

    def verifying(self, call: VerifyCall) -> Steps[Any, Any, TargetRows]:
        """`verify` as a coroutine (batching.py); an engine that cannot share forwards runs it whole."""
        prefix = call.prefix
        self._leases.begin_call(prefix.session_id, VerifierUnavailable)
        if not self._leases.has_room(prefix.session_id, prefix.num_committed + len(call.draft_token_ids)):
            self.release(prefix.session_id)
            raise VerifierUnavailable(NO_ROOM)
        if isinstance(self._engine, BatchingVerifier):
            return (yield from self._engine.verifying(call))
        with self._leases.busy():
            return self._engine.verify(call)

    def forward_parts(self, parts: Sequence[Any]) -> Sequence[Any]:
        assert isinstance(self._engine, BatchingVerifier), "only a batching engine asks for forwards"
        with self._leases.busy(len(parts)):
            return self._engine.forward_parts(parts)

    def resolve(self, call: ResolveCall) -> ResolvedToken:
        """Raises VerifierUnavailable without a lease."""
        self._leases.begin_call(call.session_id, VerifierUnavailable)
        with self._leases.busy():
            return self._engine.resolve(call)

    def release(self, session_id: str) -> None:
        self._engine.release(session_id)
        self._leases.release(session_id)


class GuardedDrafter:
    """A DrafterEngine that serves leased sessions only."""

    def __init__(self, engine: DrafterEngine, leases: OpenLeases) -> None:
        self._engine, self._leases = engine, leases

    @property
    def info(self) -> DrafterInfo:
        return self._engine.info

    @property
    def num_sessions(self) -> int:
        return self._engine.num_sessions

    def draft(self, call: DraftCall) -> DraftBlock:
        """Raises DrafterUnavailable without a lease."""
        return run_alone(self.drafting(call), self.forward_parts)

    def drafting(self, call: DraftCall) -> Steps[Any, Any, DraftBlock]:
        """`draft` as a coroutine (batching.py); an engine that cannot share forwards runs it whole."""
        prefix = call.prefix
        self._leases.begin_call(prefix.session_id, DrafterUnavailable)
        num_drafted = len(call.drafted_token_ids) + call.num_draft_tokens
        if not self._leases.has_room(prefix.session_id, prefix.num_committed + num_drafted):
            self.release(prefix.session_id)
            raise DrafterUnavailable(NO_ROOM)
        if isinstance(self._engine, BatchingDrafter):
            return (yield from self._engine.drafting(call))
        with self._leases.busy():
            return self._engine.draft(call)

    def forward_parts(self, parts: Sequence[Any]) -> Sequence[Any]:
        assert isinstance(self._engine, BatchingDrafter), "only a batching engine asks for forwards"
        with self._leases.busy(len(parts)):
            return self._engine.forward_parts(parts)

    def release(self, session_id: str) -> None:
        self._engine.release(session_id)
        self._leases.release(session_id)


class CallerWatch:
    """Knows when an actor that holds leases here has died: one task per caller, however many leases it holds."""

    def __init__(self) -> None:
        self._until_dead: dict[ActorHandle, asyncio.Task[None]] = {}

    async def until_dead(self, caller: ActorHandle | None) -> None:
        """Returns when `caller` is dead; never for None (a caller outside the cluster's actors)."""
        if caller is None:
            await asyncio.Event().wait()
            return
        task = self._until_dead.get(caller)
        if task is None:
            task = self._until_dead[caller] = asyncio.create_task(_poll(caller))
            task.add_done_callback(lambda _: self._until_dead.pop(caller, None))
        await asyncio.shield(task)


async def _poll(caller: Any) -> None:
    while True:
        try:
            await caller.__ray_ready__.remote()
        except ActorDiedError:
            return
        except RayError:  # out of reach for the moment: not dead
            pass
        await asyncio.sleep(CALLER_POLL_S)


class Replica:
    """One engine, its endpoint and its leases. Belongs to the event loop of the Serve replica's user code."""

    def __init__(
        self,
        endpoint: Endpoint,
        leases: OpenLeases,
        *,
        max_call_s: float,
        idle_lease_s: float = IDLE_LEASE_S,
    ) -> None:
        self._endpoint, self._leases = endpoint, leases
        self._max_call_s, self._idle_lease_s = max_call_s, idle_lease_s
        self._grant = envelope.pack(LeaseGrant(endpoint.address, ray.get_runtime_context().get_node_id()))
        self._callers = CallerWatch()
        self._releases: set[asyncio.Task[None]] = set()
        self._gauges = {name: Gauge(f"specdiff_{name}", description=text) for name, text in GAUGES.items()}

    async def lease(
        self, session_id: str, caller: ActorHandle | None, num_tokens: int = 0, max_tokens: int = 0
    ) -> AsyncGenerator[bytes, None]:
        """Yields one LeaseGrant, then stays open until the session is released or idle, or the caller cancels or dies.

        However it ends, the session's cache is freed. Yields nothing when there is no room. `num_tokens`: cached at once;
        `max_tokens`: that the session may come to (reservations.py).
        """
        released = self._leases.open(session_id, num_tokens, max_tokens)
        if released is None:
            return
        ends = [asyncio.create_task(released.wait()), asyncio.create_task(self._callers.until_dead(caller))]
        try:
            yield self._grant
            while not any(end.done() for end in ends):
                left_s = self._idle_lease_s - self._leases.idle_s(session_id)
                if left_s <= 0:
                    break
                await asyncio.wait(ends, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ends:
                task.cancel()
            if self._leases.close(session_id, released):
                task = asyncio.create_task(self._endpoint.release(session_id))
                self._releases.add(task)
                task.add_done_callback(self._releases.discard)
                task.add_done_callback(lambda _: self._leases.freed(session_id))
                await asyncio.shield(task)  # the slot Serve counts is free when the cache is

    def counters(self) -> dict[str, int | str]:
        """For tests and operators."""
        return {
            "pid": os.getpid(),
            "address": self._endpoint.address,
            "num_sessions": self._endpoint.engine.num_sessions,
            "num_leases": len(self._leases),
            "num_calls": self._leases.num_calls,
            **self._kv_counters(),
        }

    def _kv_counters(self) -> dict[str, int]:
        """One for each of GAUGES."""
        kv = self._leases.kv
        return {
            "kv_tokens_reserved": kv.num_tokens,
            "kv_tokens_total": NO_LIMIT if kv.max_tokens is None else kv.max_tokens,
            "kv_waiting": kv.num_waiting,
            "kv_returns": kv.num_returns,
        }

    def busy_intervals(self, since_s: float) -> list[BusyInterval]:
        """When the engine was at work since `since_s`, a time of this machine's monotonic clock; the last calls only."""
        return self._leases.busy_log.since(since_s)

    def check_model(self) -> None:
        """Raises RuntimeError when the model has been at one call for too long: Serve then replaces the replica. Also the moment
        at which the gauges are set."""
        for name, value in self._kv_counters().items():
            self._gauges[name].set(value)
        since = self._leases.busy_since
        if since is not None and monotonic() - since > self._max_call_s:
            raise RuntimeError(f"a model call has been running for more than {self._max_call_s} s")
