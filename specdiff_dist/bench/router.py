"""`specdiff bench router`: how many rounds one router process carries, and what it adds to them.

The real round loop and the real gRPC clients run in this process, on one core; the replicas are synthetic, in a process of
their own, and answer after stated latencies. What a round takes beyond those is added by the router and the wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from time import perf_counter, process_time
from typing import Any, NoReturn

import numpy as np

from specdiff_dist.bench.event_loop import run
from specdiff_dist.bench.pinning import pinned, usable_cores
from specdiff_dist.bench.synthetic_pair import PairShape, SyntheticPair
from specdiff_dist.bench.synthetic_replicas import Latencies, Replicas, running_replicas
from specdiff_dist.config import DecodeConfig
from specdiff_dist.core.pair_knowledge import PairKnowledge
from specdiff_dist.engine import decode
from specdiff_dist.transport.channel_pool import ChannelPool
from specdiff_dist.transport.grpc_client import GrpcDrafter, GrpcVerifier
from specdiff_dist.types import DrafterInfo, GenerateRequest, SamplingParams, TokenChunk

DRAFT_S, VERIFY_S = 0.010, 0.050  # what calls take at least


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """What is asked of the router. A session asks for one answer after the other."""

    config: DecodeConfig
    offered_rounds_per_s: float  # what the replicas allow: beyond it latencies grow, as those of larger batches do
    seconds: float  # measured per number of sessions
    num_prompt_tokens: int = 200
    max_tokens: int = 256
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(0.7, 50, 0.95))

    def latencies(self, num_sessions: int) -> Latencies:
        """With which so many sessions offer no more rounds than the replicas allow."""
        stretch = max(num_sessions / self.offered_rounds_per_s / (DRAFT_S + VERIFY_S), 1.0)
        return Latencies(stretch * DRAFT_S, stretch * VERIFY_S)


@dataclass(frozen=True, slots=True)
class RouterPoint:
    """What so many sessions at once got."""

    sessions: int
    draft_ms: float  # stated
    verify_ms: float
    rounds_per_s: float
    p50_added_ms: float  # a round's wall time less what its calls say that they took
    p99_added_ms: float
    cpu_us_per_round: float  # of the whole process, with all its threads
    drafts_per_round: float  # the share of rounds that drafted
    verified_per_round: float
    tokens_per_round: float
    bytes_per_round: float


@dataclass(frozen=True, slots=True)
class RouterBench:
    """Points by rising number of sessions, and one at the least latencies, where nothing but the router limits the rounds."""

    points: tuple[RouterPoint, ...]
    sessions: int  # of the headline numbers
    saturated: RouterPoint

    @property
    def headline(self) -> RouterPoint:
        return next(point for point in self.points if point.sessions == self.sessions)

    @property
    def slope_us_per_session(self) -> float:
        """By how much a further session lengthens every round: least squares of CPU time over the number of sessions. A
        process that few sessions wake for single rounds pays for its waking, so this may well be negative."""
        return _slope(self.points)

    @property
    def loaded_slope_us_per_session(self) -> float:
        """The same over the points that all offer the same number of rounds; 0 unless there are two."""
        return _slope([point for point in self.points if point.verify_ms > 1e3 * VERIFY_S])

    def report(self) -> dict[str, Any]:
        """As JSON; keys are part of the command's contract."""
        return {
            "rounds_per_s": self.headline.rounds_per_s,
            "p99_added_ms": self.headline.p99_added_ms,
            "sessions": self.sessions,
            "slope_us_per_session": self.slope_us_per_session,
            "loaded_slope_us_per_session": self.loaded_slope_us_per_session,
            "saturated_rounds_per_s": self.saturated.rounds_per_s,
            "points": [asdict(point) for point in self.points],
            "saturated": asdict(self.saturated),
        }


def _slope(points: Sequence[RouterPoint]) -> float:
    if len(points) < 2:
        return 0.0
    sessions, cost = np.array([(point.sessions, point.cpu_us_per_round) for point in points]).T
    spread = sessions - sessions.mean()
    return float(spread @ cost / (spread @ spread))


def measure_router(
    load: RouterLoad,
    session_counts: Sequence[int],
    headline: int,
    shape: PairShape,
    *,
    progress: Callable[[], None] = lambda: None,
) -> RouterBench:
    """One point per number of sessions, `headline` among them, and one of `headline` sessions at the least latencies.

    This process runs on one core meanwhile and the replicas on the others, where there are others.
    """
    cores = usable_cores()
    drafter = SyntheticPair(shape).drafter_info
    points = []
    with running_replicas(shape, cores[1:] or cores) as replicas, pinned(cores[:1]):
        for count, latencies in (
            *((count, load.latencies(count)) for count in session_counts),
            (headline, Latencies(DRAFT_S, VERIFY_S)),
        ):
            replicas.set_latencies(latencies)
            points.append(run(_Run(load, count, latencies, replicas, drafter).measure()))
            progress()
    return RouterBench(tuple(points[:-1]), headline, points[-1])


class _Run:
    """So many sessions at once, for a while."""

    def __init__(
        self, load: RouterLoad, num_sessions: int, latencies: Latencies, replicas: Replicas, drafter: DrafterInfo
    ) -> None:
        self._load, self._num_sessions, self._latencies, self._replicas = load, num_sessions, latencies, replicas
        self._round_s = latencies.draft_s + latencies.verify_s
        self._drafter_info = drafter
        self._prompt = tuple(range(load.num_prompt_tokens))
        self._knowledge = PairKnowledge()
        self._chunks: list[TokenChunk] = []

    async def measure(self) -> RouterPoint:
        pool = ChannelPool()
        async with asyncio.TaskGroup() as group:
            sessions = [group.create_task(self._session(number, pool)) for number in range(self._num_sessions)]
            await asyncio.sleep(self._load.seconds / 8 + 2.0 * self._round_s)  # warms up
            self._chunks.clear()
            started, used = perf_counter(), process_time()
            await asyncio.sleep(self._load.seconds)
            chunks, wall_s, cpu_s = list(self._chunks), perf_counter() - started, process_time() - used
            for task in sessions:
                task.cancel()
        await pool.close()
        return self._point(chunks, wall_s, cpu_s)

    async def _session(self, number: int, pool: ChannelPool) -> NoReturn:
        load = self._load
        await asyncio.sleep(number / self._num_sessions * self._round_s)  # not all at once
        num_answers = 0
        while True:
            num_answers += 1
            request = GenerateRequest(
                f"{number}-{num_answers}", self._prompt, load.sampling, seed=number, max_tokens=load.max_tokens
            )
            drafter = GrpcDrafter(self._replicas.drafter, pool=pool)
            verifier = GrpcVerifier(self._replicas.verifier, pool=pool)
            knowledge = self._knowledge.for_session(load.config, self._drafter_info, is_greedy=False)
            answer = decode(request, load.config, drafter, verifier, tier="", knowledge=knowledge)
            async with aclosing(answer) as chunks:
                async for chunk in chunks:
                    self._chunks.append(chunk)
            await drafter.close()
            await verifier.close()

    def _point(self, chunks: Sequence[TokenChunk], wall_s: float, cpu_s: float) -> RouterPoint:
        """Raises RuntimeError when there is nothing to tell of."""
        rounds = [record for chunk in chunks for record in chunk.rounds]
        if not rounds:
            raise RuntimeError("no round ended while it was measured; give more --seconds")
        added = [one.wall_s - one.draft.forward_s - one.verify.forward_s for one in rounds]
        num_bytes = [cost.bytes_sent + cost.bytes_received for one in rounds for cost in (one.draft, one.verify)]
        return RouterPoint(
            self._num_sessions, 1e3 * self._latencies.draft_s, 1e3 * self._latencies.verify_s, len(rounds) / wall_s,
            1e3 * float(np.median(added)), 1e3 * float(np.quantile(added, 0.99)), 1e6 * cpu_s / len(rounds),
            sum(one.num_drafted > 0 for one in rounds) / len(rounds), sum(one.num_verified for one in rounds) / len(rounds),
            sum(len(chunk.token_ids) for chunk in chunks) / len(rounds), sum(num_bytes) / len(rounds),
        )  # fmt: skip
