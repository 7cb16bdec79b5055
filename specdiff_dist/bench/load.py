"""Many clients at once: closed loops and Poisson arrivals, with speculation on and off in turns. Knows no HTTP.

What a client saw of an answer is a `Streamed`; whoever gives an `Ask` decides where answers come from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np

ON, OFF = "on", "off"


@dataclass(frozen=True, slots=True)
class Streamed:
    """One request as its client saw it. Times are seconds of one monotonic clock."""

    prompt: int  # index of the prompt
    sent_s: float
    ended_s: float
    chunks: tuple[tuple[float, int], ...]  # when a chunk came, and how many tokens it brought (≥ 1)
    token_ids: tuple[int, ...]
    num_retries: int = 0  # how often it was told to come back later, and did
    failure: str | None = None  # why the answer is not whole

    @property
    def is_whole(self) -> bool:
        return self.failure is None


@dataclass(frozen=True, slots=True)
class Run:
    """The answers of one measured stretch."""

    answers: tuple[Streamed, ...]

    @property
    def start_s(self) -> float:
        return min(answer.sent_s for answer in self.answers)

    @property
    def end_s(self) -> float:
        return max(answer.ended_s for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Of whole answers, over everything from the first request to the last token."""
        num_tokens = sum(len(answer.token_ids) for answer in self.answers if answer.is_whole)
        return num_tokens / (self.end_s - self.start_s)


@dataclass(frozen=True, slots=True)
class Point:
    """One load, measured several times with speculation on and off; runs with the same index followed each other."""

    on: tuple[Run, ...]
    off: tuple[Run, ...]
    concurrency: int | None = None
    rate: float | None = None  # requests per second


Ask = Callable[[int, str], Awaitable[Streamed]]
"""Asks for the answer to a prompt (its index), with speculation ON or OFF; a failure is an answer that says so."""


async def closed_loop(ask: Ask, prompts: Iterable[int], concurrency: int, mode: str) -> Run:
    """So many clients; each sends its next request when its last one is answered."""
    waiting = iter(prompts)
    answers: list[Streamed] = []

    async def client() -> None:
        for prompt in waiting:
            answers.append(await ask(prompt, mode))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return Run(tuple(answers))


async def open_loop(ask: Ask, prompts: Sequence[int], arrivals_s: Sequence[float], mode: str) -> Run:
    """Each request is sent at its time, counted from the start, whatever became of those before."""
    started = monotonic()

    async def client(prompt: int, arrival_s: float) -> Streamed:
        await asyncio.sleep(started + arrival_s - monotonic())
        return await ask(prompt, mode)

    answers = await asyncio.gather(*map(client, prompts, arrivals_s))
    return Run(tuple(answers))


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Times in seconds at which `count` requests arrive, `rate` a second on average."""
    return np.random.default_rng(seed).exponential(1.0 / rate, count).cumsum().tolist()


async def in_turns(run: Callable[[str], Awaitable[Run]], repeats: int) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """The runs with speculation on, and those with it off. They alternate, and so does which comes first: a machine that
    slows down, or a prompt that is cached by now, does not favour one of them."""
    found: dict[str, list[Run]] = {ON: [], OFF: []}
    for repeat in range(repeats):
        for mode in (ON, OFF) if repeat % 2 == 0 else (OFF, ON):
            found[mode].append(await run(mode))
    return tuple(found[ON]), tuple(found[OFF])


def picks(num_prompts: int, count: int) -> list[int]:
    """Which prompts `count` requests ask: all in order, again and again."""
    return [index % num_prompts for index in range(count)]
