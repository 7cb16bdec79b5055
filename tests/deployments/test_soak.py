"""Many requests of all kinds, many of them broken off: memory, files and threads stay flat, nothing is left behind (K26).

The short versions find what grows fast. The slow ones print and bound the slopes, after as many requests as it takes
until the verifier's kernel caches, one kernel per shape, are full.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from specdiff_dist.config import TIERS
from tests.deployments.process_usage import Usage, serve_processes, slope_kb, usage
from tests.deployments.role_doubles import seconds_until
from tests.deployments.tiny_service import Service, ask, body_of, prompt_of, tiny_service

pytestmark = pytest.mark.ray

NUM_CLIENTS = 12
CANCELLED_SHARE = 0.2
SPARE_FDS = 8  # connections come and go; a leak of one in a hundred requests is more in the slow versions
SPARE_THREADS = 4

MakeBody = Callable[[random.Random], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the requests ended, and what each process used meanwhile."""

    num_whole: int
    num_cancelled: int
    usage: dict[str, list[Usage]]


@pytest.fixture(scope="module")
def service(serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with tiny_service(tmp_path_factory.mktemp("soak"), serve_port, "soak") as service:
        yield service


def anything(rng: random.Random) -> dict[str, Any]:
    """A request of any length, tier and kind."""
    quality: dict[str, Any] = {"tier": rng.choice(list(TIERS))}
    if rng.random() < 0.5:
        quality["speculation"] = rng.choice([0, 1, 4, 8])
    return body_of(
        prompt_of(rng.choice([1, 5, 40, 300]) + rng.randrange(20), rng.randrange(1000)),
        max_tokens=rng.randrange(1, 40),
        temperature=rng.choice([0, 0.8, 1.0]),
        stream=rng.random() < 0.5,
        quality=quality,
    )


def plain(rng: random.Random) -> dict[str, Any]:
    """A short answer without speculation."""
    return body_of(prompt_of(8, rng.randrange(1000)), max_tokens=2, quality={"tier": "exact", "speculation": "off"})


async def soak(
    service: Service, make_body: MakeBody, num_requests: int, *, num_warm: int = 0, cancelled_share: float = 0.0
) -> Outcome:
    """Sends them from NUM_CLIENTS clients, the first `num_warm` before anything is measured. Fails when an answer that was
    not cancelled is not whole."""
    rng, processes = random.Random(5), serve_processes(service.name)
    assert processes.keys() == {"ingress", "router", "verifier", "drafter", "proxy"}
    samples: dict[str, list[Usage]] = {name: [] for name in processes}
    numbers = iter(range(num_warm + num_requests))
    done = {"whole": 0, "cancelled": 0}

    async def client(http: httpx.AsyncClient) -> None:
        for number in numbers:
            task = asyncio.create_task(ask(http, make_body(rng)))
            if rng.random() < cancelled_share:
                await asyncio.wait({task}, timeout=rng.choice([0.0, 0.002, 0.02, 0.1]))
                task.cancel()
            await asyncio.wait({task})
            done["cancelled" if task.cancelled() else "whole"] += 1
            if not task.cancelled():
                task.result()
            if number >= num_warm and number % max(num_requests // 30, 1) == 0:
                for name, pid in processes.items():
                    samples[name].append(usage(pid, number))

    async with service.client() as http:
        await asyncio.gather(*(client(http) for _ in range(NUM_CLIENTS)))
    return Outcome(done["whole"], done["cancelled"], samples)


def check_flat(outcome: Outcome, most_kb_per_request: float) -> None:
    """Prints what every process used; fails where something grows."""
    for name, samples in outcome.usage.items():
        print(
            f"{name:>8}: {samples[0].rss_kb / 1024:6.1f} -> {samples[-1].rss_kb / 1024:6.1f} MB, "
            f"{slope_kb(samples):+.2f} kB a request, {samples[-1].num_fds} files, {samples[-1].num_threads} threads"
        )
    for name, samples in outcome.usage.items():
        half = len(samples) // 2
        first, last = samples[half // 2 : half], samples[-(half // 2) :]
        assert slope_kb(samples) < most_kb_per_request, name
        assert max(one.num_fds for one in last) <= max(one.num_fds for one in first) + SPARE_FDS, name
        assert max(one.num_threads for one in last) <= max(one.num_threads for one in first) + SPARE_THREADS, name


@pytest.mark.parametrize(
    ("num_requests", "num_warm", "most_kb_per_request"), [(120, 0, 2000), pytest.param(1000, 800, 20, marks=pytest.mark.slow)]
)  # fmt: skip
async def test_requests_of_all_kinds_leave_nothing_behind(service, num_requests, num_warm, most_kb_per_request):
    outcome = await soak(service, anything, num_requests, num_warm=num_warm, cancelled_share=CANCELLED_SHARE)
    assert outcome.num_whole + outcome.num_cancelled == num_warm + num_requests
    assert 0 < outcome.num_cancelled < (num_warm + num_requests) / 3
    await asyncio.to_thread(seconds_until, service.nothing_held)
    check_flat(outcome, most_kb_per_request)


@pytest.mark.parametrize(
    ("num_requests", "most_kb_per_request"), [(120, 400), pytest.param(10_000, 2, marks=pytest.mark.slow)]
)
async def test_speculation_switched_off_leaves_nothing_behind(service, num_requests, most_kb_per_request):
    """vLLM pull request 15506: drafter state piled up while nobody drafted. grpc issue 17379: a channel per call."""
    outcome = await soak(service, plain, num_requests)
    assert outcome.num_whole == num_requests
    await asyncio.to_thread(seconds_until, service.nothing_held)
    check_flat(outcome, most_kb_per_request)
