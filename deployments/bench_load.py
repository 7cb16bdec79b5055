"""`specdiff bench load`: many clients over HTTP, against the deployments on this machine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import aiohttp
from ray import serve

from deployments.bench_app import APP_NAME
from deployments.bench_speed import error_message, served
from deployments.busy import MAX_INTERVALS, BusyInterval
from deployments.settings import AppSettings
from specdiff_dist.bench.load import (
    OFF,
    ON,
    Ask,
    Point,
    Run,
    Streamed,
    closed_loop,
    in_turns,
    open_loop,
    picks,
    poisson_arrivals,
)
from specdiff_dist.errors import InvalidConfig

PATIENCE_S = 600.0  # of a client, for a whole answer, retries included
LONGEST_EVENT = 1 << 20  # bytes
ROLES = ("drafter", "verifier")  # lanes, as their deployments are called


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is asked for."""

    prompts: Sequence[Sequence[int]]  # token ids
    options: Mapping[str, Any]  # fields of every request; max_tokens is one of them
    qualities: Mapping[str, Mapping[str, Any]]  # `quality` with speculation ON and OFF
    repeats: int = 3
    requests_per_client: int = 2
    min_requests: int = 8

    def requests(self, concurrency: int) -> list[int]:
        """The prompts of one closed loop."""
        return picks(len(self.prompts), max(self.requests_per_client * concurrency, self.min_requests))


class LoadClient:
    """Sends requests as a client would: streaming, and back later when told to."""

    def __init__(self, session: aiohttp.ClientSession, plan: LoadPlan, *, patience_s: float = PATIENCE_S) -> None:
        """`session` has the service's address as its base."""
        self._session, self._plan, self._patience_s = session, plan, patience_s

    async def ask(self, prompt: int, mode: str) -> Streamed:
        """Never raises for anything the service does: `failure` says what was wrong."""
        body = {
            **self._plan.options, "prompt": list(self._plan.prompts[prompt]), "quality": self._plan.qualities[mode],
            "stream": True, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        sent_s, answer, num_retries = monotonic(), _Reading(), 0
        try:
            async with asyncio.timeout(self._patience_s):
                while (wait_s := await self._try(body, answer)) is not None:
                    num_retries += 1
                    await asyncio.sleep(wait_s)
        except TimeoutError:
            answer.failure = f"no whole answer within {self._patience_s:g} s"
        except aiohttp.ClientError as error:
            answer.failure = f"connection: {type(error).__name__}"
        answer.check(self._plan.options["max_tokens"])
        return Streamed(
            prompt, sent_s, monotonic(), tuple(answer.chunks), tuple(answer.token_ids), num_retries, answer.failure
        )

    async def _try(self, body: Mapping[str, Any], answer: _Reading) -> float | None:
        """Reads the answer; or the seconds after which to come back."""
        async with self._session.post("/v1/completions", json=body) as response:
            retry_after = response.headers.get("retry-after")
            if response.status in (429, 503) and retry_after is not None:
                return float(retry_after)
            if response.status != 200:
                answer.failure = f"status {response.status}: {error_message(await response.read())}"
                return None
            async for line in response.content:
                answer.read(line)
        return None


@dataclass(slots=True)
class _Reading:
    """A streamed answer as it comes."""

    chunks: list[tuple[float, int]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    is_done: bool = False
    failure: str | None = None

    def read(self, line: bytes) -> None:
        """One line of the event stream."""
        if not line.startswith(b"data: "):
            return
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            self.is_done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.failure = f"error event: {event['error'].get('code')}"
            return
        for choice in event["choices"]:
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            if token_ids := choice["token_ids"]:
                self.chunks.append((monotonic(), len(token_ids)))
                self.token_ids += token_ids

    def check(self, max_tokens: int) -> None:
        """Notes what is missing of a whole answer: every token, a finish reason, the stream's end."""
        if self.failure is None and not (self.is_done and self.finish_reason is not None):
            self.failure = "the stream broke off"
        if self.failure is None and len(self.token_ids) != max_tokens:
            self.failure = f"{len(self.token_ids)} of {max_tokens} tokens"


def measure_points(
    settings: AppSettings,
    plan: LoadPlan,
    concurrencies: Sequence[int],
    rates: Sequence[float],
    *,
    num_arrivals: int,
    seed: int,
    progress: Callable[[str], None],
) -> list[Point]:
    """Every point, on one service of its own. Raises the errors of specdiff_dist.errors."""

    async def measure(ask: Ask) -> list[Point]:
        points = []
        for concurrency in concurrencies:
            progress(f"concurrency {concurrency}")
            prompts = plan.requests(concurrency)
            runs = await in_turns(lambda mode, p=prompts, c=concurrency: closed_loop(ask, p, c, mode), plan.repeats)
            points.append(Point(*runs, concurrency=concurrency))
        for rate in rates:
            progress(f"{rate:g} requests/s")
            prompts, arrivals = picks(len(plan.prompts), num_arrivals), poisson_arrivals(rate, num_arrivals, seed)
            runs = await in_turns(lambda mode, p=prompts, a=arrivals: open_loop(ask, p, a, mode), plan.repeats)
            points.append(Point(*runs, rate=rate))
        return points

    with served(settings) as port:
        return asyncio.run(_with_client(port, plan, measure))


def measure_overlap(
    settings: AppSettings, plan: LoadPlan, concurrency: int
) -> tuple[Run, dict[str, list[BusyInterval]]]:
    """A closed loop with speculation on, and when each role's engines were at work. Raises as `measure_points`, and
    InvalidConfig when the replicas no longer remember the beginning."""

    async def measure(ask: Ask) -> Run:
        return await closed_loop(ask, plan.requests(concurrency), concurrency, ON)

    with served(settings) as port:
        run = asyncio.run(_with_client(port, plan, measure))
        return run, {role: _busy_since(role, run.start_s) for role in ROLES}


def _busy_since(role: str, start_s: float) -> list[BusyInterval]:
    handle = serve.get_deployment_handle(role.capitalize(), APP_NAME)
    intervals = []
    for each in handle.broadcast("busy_intervals", start_s).results(timeout_s=20):
        if len(each) == MAX_INTERVALS:
            raise InvalidConfig("more calls than a replica remembers; measure fewer requests or tokens")
        intervals += each
    return sorted(intervals)


async def _with_client(port: int, plan: LoadPlan, measure: Callable[[Ask], Any]) -> Any:
    """`measure` with a client whose service is warm: both ways of decoding have been used."""
    no_limit = aiohttp.TCPConnector(limit=0)  # the load is ours to set
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{port}", connector=no_limit, read_bufsize=LONGEST_EVENT,
        timeout=aiohttp.ClientTimeout(total=None),
    ) as session:  # fmt: skip
        ask = LoadClient(session, plan).ask
        for mode in (OFF, ON):
            warm = await closed_loop(ask, picks(len(plan.prompts), 2), 2, mode)
            if failures := [answer.failure for answer in warm.answers if answer.failure is not None]:
                raise InvalidConfig(f"the service does not answer: {failures[0]}")
        return await measure(ask)
