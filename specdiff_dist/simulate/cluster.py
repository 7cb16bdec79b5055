"""Discrete-event simulation of routers, drafters and verifiers, to plan clusters before they are bought.

A session is leased to one drafter and one verifier (the least loaded when it arrives) and runs rounds:
router → wire → drafter queue → draft → wire → router → wire → verifier queue → verify → wire → router → …
Replicas serve batches: whoever waits when a replica becomes free shares its next forward.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specdiff_dist.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class BatchCost:
    """Seconds of one forward over a batch: base + per_session·sessions + per_token·tokens."""

    base_s: float
    per_session_s: float = 0.0
    per_token_s: float = 0.0

    def __call__(self, num_sessions: int, num_tokens: int) -> float:
        return self.base_s + self.per_session_s * num_sessions + self.per_token_s * num_tokens


@dataclass(frozen=True, slots=True)
class Cluster:
    """What there is. One-way wire time covers serialisation."""

    num_routers: int = 1
    num_drafters: int = 1
    num_verifiers: int = 1
    draft: BatchCost = field(default_factory=lambda: BatchCost(0.01))
    verify: BatchCost = field(default_factory=lambda: BatchCost(0.04, 0.0, 0.001))
    router_s: float = 0.0005  # per round, serial within a router
    wire_s: float = 0.0005
    max_batch: int = 64  # sessions per forward
    max_sessions: int = 1_000_000  # per verifier; more wait for a lease

    def __post_init__(self) -> None:
        if min(self.num_routers, self.num_drafters, self.num_verifiers, self.max_batch, self.max_sessions) < 1:
            raise InvalidConfig("a cluster needs at least one of everything")


@dataclass(frozen=True, slots=True)
class Load:
    """What arrives. `lengths` and `accepted` are samples to draw from: (tokens verified, tokens accepted) per round."""

    num_sessions: int
    tokens_per_session: int
    rounds: Sequence[tuple[int, int]]
    arrivals_per_s: float | None = None  # Poisson; None: all at once

    def __post_init__(self) -> None:
        if self.num_sessions < 1 or self.tokens_per_session < 1 or not self.rounds:
            raise InvalidConfig("a load needs sessions, tokens and recorded rounds")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it; latencies are from arrival to the last token, seconds of simulated time."""

    num_rounds: int
    num_tokens: int
    makespan_s: float
    latencies_s: tuple[float, ...]
    drafter_busy: float  # share of time, mean over replicas
    verifier_busy: float

    @property
    def rounds_per_s(self) -> float:
        return self.num_rounds / self.makespan_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.makespan_s

    def latency_s(self, quantile: float) -> float:
        return float(np.quantile(self.latencies_s, quantile))


class _Replica:
    """A batch server."""

    __slots__ = ("busy_s", "index", "is_busy", "num_sessions", "queue")

    def __init__(self, index: int) -> None:
        self.index = index
        self.queue: deque[int] = deque()
        self.is_busy = False
        self.busy_s = 0.0
        self.num_sessions = 0


_ARRIVE, _AT_DRAFTER, _DRAFTED, _AT_VERIFIER, _VERIFIED = range(5)


def simulate(cluster: Cluster, load: Load, *, seed: int = 0) -> Outcome:
    """Runs the load to its end. Deterministic for a seed."""
    rng = np.random.default_rng(seed)
    n = load.num_sessions
    gaps = np.zeros(n) if load.arrivals_per_s is None else rng.exponential(1.0 / load.arrivals_per_s, n)
    arrivals = np.cumsum(gaps).tolist()
    draws = rng.integers(0, len(load.rounds), 1 << 16).tolist()
    rounds = list(load.rounds)
    num_draws = 0

    drafters = [_Replica(i) for i in range(cluster.num_drafters)]
    verifiers = [_Replica(i) for i in range(cluster.num_verifiers)]
    router_free = [0.0] * cluster.num_routers
    left = [load.tokens_per_session] * n
    current: list[tuple[int, int]] = [(0, 0)] * n
    homes: list[tuple[_Replica, _Replica] | None] = [None] * n
    ended = [0.0] * n
    waiting: deque[int] = deque()
    events: list[tuple[float, int, int, object]] = [(t, i, _ARRIVE, i) for i, t in enumerate(arrivals)]
    heapq.heapify(events)
    order = n
    num_rounds = num_tokens = 0
    now = 0.0
    wire_s, router_s, max_batch = cluster.wire_s, cluster.router_s, cluster.max_batch
    loads_d = [(0, i) for i in range(len(drafters))]
    loads_v = [(0, i) for i in range(len(verifiers))]

    def push(time: float, kind: int, what: object) -> None:
        nonlocal order
        order += 1
        heapq.heappush(events, (time, order, kind, what))

    def least_loaded(heap: list[tuple[int, int]], replicas: list[_Replica]) -> _Replica:
        while True:  # every change of a count adds an entry; those that are out of date are dropped as they come up
            count, index = heap[0]
            replica = replicas[index]
            if count == replica.num_sessions:
                heapq.heapreplace(heap, (count + 1, index))
                replica.num_sessions += 1
                return replica
            heapq.heappop(heap)

    def leave(heap: list[tuple[int, int]], replica: _Replica) -> None:
        replica.num_sessions -= 1
        heapq.heappush(heap, (replica.num_sessions, replica.index))

    def route(session: int, time: float) -> None:
        """The router's share of a round, then the drafter."""
        index = session % len(router_free)
        free = max(router_free[index], time) + router_s
        router_free[index] = free
        push(free + wire_s, _AT_DRAFTER, session)

    def serve(replica: _Replica, cost: BatchCost, done: int, time: float) -> None:
        if replica.is_busy or not replica.queue:
            return
        batch = [replica.queue.popleft() for _ in range(min(len(replica.queue), max_batch))]
        seconds = cost(len(batch), sum(current[session][0] for session in batch))
        replica.is_busy = True
        replica.busy_s += seconds
        push(time + seconds, done, (replica, batch))

    def admit(session: int, time: float) -> bool:
        if min(verifier.num_sessions for verifier in verifiers) >= cluster.max_sessions:
            return False
        homes[session] = (least_loaded(loads_d, drafters), least_loaded(loads_v, verifiers))
        begin(session, time)
        return True

    def begin(session: int, time: float) -> None:
        nonlocal num_draws
        current[session] = rounds[draws[num_draws & 0xFFFF]]
        num_draws += 1
        route(session, time)

    is_bounded = cluster.max_sessions < n
    while events:
        now, _, kind, what = heapq.heappop(events)
        if kind == _ARRIVE:
            session: int = what  # type: ignore[assignment]
            if is_bounded:
                if not admit(session, now):
                    waiting.append(session)
            else:
                homes[session] = (least_loaded(loads_d, drafters), least_loaded(loads_v, verifiers))
                begin(session, now)
        elif kind == _AT_DRAFTER:
            session = what  # type: ignore[assignment]
            drafter, verifier = homes[session]  # type: ignore[misc]
            if current[session][0] == 0:  # a plain round
                verifier.queue.append(session)
                serve(verifier, cluster.verify, _VERIFIED, now)
            else:
                drafter.queue.append(session)
                serve(drafter, cluster.draft, _DRAFTED, now)
        elif kind == _DRAFTED:
            replica, batch = what  # type: ignore[misc]
            replica.is_busy = False
            for session in batch:
                push(now + 2 * wire_s, _AT_VERIFIER, session)
            serve(replica, cluster.draft, _DRAFTED, now)
        elif kind == _AT_VERIFIER:
            session = what  # type: ignore[assignment]
            verifier = homes[session][1]  # type: ignore[index]
            verifier.queue.append(session)
            serve(verifier, cluster.verify, _VERIFIED, now)
        else:
            replica, batch = what  # type: ignore[misc]
            replica.is_busy = False
            for session in batch:
                num_rounds += 1
                kept = min(current[session][1] + 1, left[session])
                num_tokens += kept
                left[session] -= kept
                if left[session] > 0:
                    begin(session, now + wire_s)
                    continue
                ended[session] = now + wire_s
                drafter, verifier = homes[session]  # type: ignore[misc]
                leave(loads_d, drafter)
                leave(loads_v, verifier)
                if waiting and admit(waiting[0], now):
                    waiting.popleft()
            serve(replica, cluster.verify, _VERIFIED, now)

    makespan = max(ended)
    return Outcome(
        num_rounds,
        num_tokens,
        makespan,
        tuple(end - start for end, start in zip(ended, arrivals, strict=True)),
        sum(one.busy_s for one in drafters) / len(drafters) / makespan,
        sum(one.busy_s for one in verifiers) / len(verifiers) / makespan,
    )
