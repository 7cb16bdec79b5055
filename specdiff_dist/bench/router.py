"""`specdiff bench router`: how many rounds one router process carries, and what it adds to them.

The real round loop and the real gRPC clients run in this process, on one core; the replicas are synthetic, in a process of
their own, and answer after stated latencies. What a round takes beyond those is added by the router and the wire.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import NoReturn

import numpy as np

from specdiff_dist.bench.pinning import pinned, usable_cores
from specdiff_dist.bench.synthetic_pair import PairShape, prompt
from specdiff_dist.bench.synthetic_replicas import Latencies, Replicas, running_replicas
from specdiff_dist.config import DecodeConfig
from specdiff_dist.core.pair_knowledge import PairKnowledge
from specdiff_dist.engine import decode
from specdiff_dist.transport.channel_pool import ChannelPool
from specdiff_dist.transport.grpc_client import GrpcDrafter, GrpcVerifier
from specdiff_dist.types import GenerateRequest, RoundRecord, SamplingParams

DRAFT_S, VERIFY_S = 0.010, 0.050  # what calls take at least


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """What is asked of the router.

    offered_rounds_per_s: what the replicas allow, all sessions together: beyond it their latencies grow, as those of larger
        batches do. inf: they never do, and the router is the limit.
    """

    config: DecodeConfig
    offered_rounds_per_s: float
    seconds: float  # measured per point
    warm_up_s: float = 1.0
    num_prompt_tokens: int = 200
    max_tokens: int = 256  # of an answer; a session asks again at once
    sampling: SamplingParams = SamplingParams(0.7, 50, 0.95)  # noqa: RUF009 (frozen)

    def latencies(self, num_sessions: int) -> Latencies:
        """Such that `num_sessions` together offer the rounds."""
        stretch = max(num_sessions / self.offered_rounds_per_s / (DRAFT_S + VERIFY_S), 1.0)
        return Latencies(stretch * DRAFT_S, stretch * VERIFY_S)


@dataclass(frozen=True, slots=True)
class RouterPoint:
    """So many sessions at once."""

    sessions: int
    draft_ms: float  # stated
    verify_ms: float
    rounds_per_s: float
    p50_added_ms: float  # a round's wall time less what its calls say they took
    p99_added_ms: float
    cpu_us_per_round: float  # of the whole process, all threads
    tokens_per_round: float
    bytes_per_round: float


@dataclass(frozen=True, slots=True)
class RouterBench:
    """Points by rising number of sessions, and one where nothing but the router limits the rounds."""

    points: tuple[RouterPoint, ...]
    saturated: RouterPoint
    num_cores: int  # that the measured process had

    @property
    def slope_us_per_session(self) -> float:
        """By how much a round's CPU time grows with each further session: least squares over the points."""
        sessions = np.array([point.sessions for point in self.points], np.float64)
        cost = np.array([point.cpu_us_per_round for point in self.points])
        spread = sessions - sessions.mean()
        return float((spread * cost).sum() / max((spread**2).sum(), 1.0))


def measure_router(
    load: RouterLoad, session_counts: Sequence[int], shape: PairShape, progress: Callable[[], None] = lambda: None
) -> RouterBench:
    """One point per number of sessions, then the largest but one again at the least latencies. Restores the core pinning.

    progress: called after each point.
    """
    cores = usable_cores()
    here, there = cores[:1], cores[1:] or cores
    points = []
    with running_replicas(shape, there) as replicas, pinned(here):
        for num_sessions in session_counts:
            points.append(asyncio.run(_measure(load, num_sessions, shape, replicas, load.latencies(num_sessions))))
            progress()
        saturated = asyncio.run(
            _measure(load, max(session_counts), shape, replicas, Latencies(DRAFT_S, VERIFY_S))
        )  # fmt: skip
        progress()
    return RouterBench(tuple(points), saturated, len(here) or os.cpu_count() or 1)


async def _measure(
    load: RouterLoad, num_sessions: int, shape: PairShape, replicas: Replicas, latencies: Latencies
) -> RouterPoint:
    replicas.set_latencies(latencies)
    pool, knowledge = ChannelPool(), PairKnowledge()
    rounds: list[RoundRecord] = []
    kept: list[int] = []

    async def session(number: int) -> NoReturn:
        await asyncio.sleep(number / num_sessions * (latencies.draft_s + latencies.verify_s))  # not all at once
        count = 0
        while True:
            count += 1
            request = GenerateRequest(
                f"{number}-{count}", tuple(prompt(shape, load.num_prompt_tokens, number).tolist()), load.sampling,
                number, load.max_tokens,
            )  # fmt: skip
            drafter, verifier = GrpcDrafter(replicas.drafter, pool=pool), GrpcVerifier(replicas.verifier, pool=pool)
            known = knowledge.for_session(load.config, None, is_greedy=False)
            async with aclosing(decode(request, load.config, drafter, verifier, tier="", knowledge=known)) as chunks:
                async for chunk in chunks:
                    rounds.extend(chunk.rounds)
                    kept.append(len(chunk.token_ids))
            await drafter.close()
            await verifier.close()

    async with asyncio.TaskGroup() as group:
        sessions = [group.create_task(session(number)) for number in range(num_sessions)]
        await asyncio.sleep(load.warm_up_s + 2.0 * (latencies.draft_s + latencies.verify_s))
        rounds.clear()
        kept.clear()
        started, used = perf_counter(), process_time()
        await asyncio.sleep(load.seconds)
        wall_s, cpu_s = perf_counter() - started, process_time() - used
        done, tokens = list(rounds), sum(kept)
        for task in sessions:
            task.cancel()
    await pool.close()
    added = [1e3 * (one.wall_s - one.draft.forward_s - one.verify.forward_s) for one in done]
    num_bytes = [cost.bytes_sent + cost.bytes_received for one in done for cost in (one.draft, one.verify)]
    num_rounds = max(len(done), 1)
    return RouterPoint(
        num_sessions, 1e3 * latencies.draft_s, 1e3 * latencies.verify_s, len(done) / wall_s,
        float(np.median(added)), float(np.quantile(added, 0.99)), 1e6 * cpu_s / num_rounds,
        tokens / num_rounds, sum(num_bytes) / num_rounds,
    )  # fmt: skip
