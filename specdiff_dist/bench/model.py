"""The throughput model (core/throughput.py) against what a pair in this process really does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from specdiff_dist.core.throughput import LineFit, ThroughputModel, mean_distance
from specdiff_dist.errors import InvalidConfig
from specdiff_dist.simulate.trace import RoundTrace

if TYPE_CHECKING:
    from specdiff_dist.api import GenerateOptions, Pair, Prompt

EFFORTS = (1, 2, 4)
LENIENCIES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured. top_k keeps target rows narrow, temperature 1 makes TV(p, q) mean something."""

    efforts: tuple[int, ...] = EFFORTS
    leniencies: tuple[float, ...] = LENIENCIES
    block: int = 4
    max_tokens: int = 48
    temperature: float = 1.0
    top_k: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        if len(set(self.efforts)) < 2 or min(self.leniencies, default=1.0) != 0.0:
            raise InvalidConfig("the model needs two efforts at least, and leniency 0 among the leniencies")
        if self.max_tokens < 2 * (self.block + 1):
            raise InvalidConfig(f"max_tokens must leave two rounds at least: {2 * (self.block + 1)} or more")


@dataclass(frozen=True, slots=True)
class Cell:
    """One (K, λ): measured over full-length rounds after each request's first, and predicted."""

    num_steps: int
    leniency: float
    num_rounds: int
    acceptance: float  # mean acceptance probability of the positions that were reached
    tokens_per_round: float
    tokens_per_s: float
    predicted_acceptance: float
    predicted_tokens_per_round: float
    predicted_tokens_per_s: float

    @property
    def relative_error(self) -> float:
        return abs(self.predicted_tokens_per_s - self.tokens_per_s) / self.tokens_per_s


@dataclass(frozen=True, slots=True)
class ModelBench:
    """The fitted model and every cell."""

    model: ThroughputModel
    cells: tuple[Cell, ...]

    @property
    def median_relative_error(self) -> float:
        return median(cell.relative_error for cell in self.cells)


Rounds = dict[tuple[int, float], list[RoundTrace]]


def measure_model(
    pair: Pair, prompts: Sequence[Prompt], settings: Settings, *, progress: Callable[[], None] = lambda: None
) -> ModelBench:
    """Runs every configuration on every prompt, side by side and round by round, so that a slow moment of the machine
    hits all of them alike.

    `progress` is called at the end of every request, `num_requests` times. Raises as `Pair.generate`.
    """
    grid = [(steps, leniency) for steps in settings.efforts for leniency in settings.leniencies]
    qualities = [_quality(settings, steps, leniency) for steps, leniency in grid]
    rounds: Rounds = {cell: [] for cell in grid}
    plain: list[RoundTrace] = []
    _record(pair, prompts[0], qualities[-1:], settings, progress)  # warms up
    for prompt in prompts:
        *recorded, without = _record(pair, prompt, [*qualities, {"speculation": 0}], settings, progress)
        plain += without
        for cell, some in zip(grid, recorded, strict=True):
            rounds[cell] += some
    return evaluate(rounds, plain, settings)


def num_requests(num_prompts: int, settings: Settings) -> int:
    """How many requests `measure_model` reports progress on."""
    return 1 + num_prompts * (len(settings.efforts) * len(settings.leniencies) + 1)


def evaluate(rounds: Rounds, plain: Sequence[RoundTrace], settings: Settings) -> ModelBench:
    """Fits the model's constants and compares. `plain`: rounds without a draft, for the cost of length 0."""
    full = {cell: [one for one in some if one.length == settings.block] for cell, some in rounds.items()}
    if not all(full.values()):
        raise InvalidConfig("some configuration had no round of full length; raise max_tokens")
    everything = [one for some in rounds.values() for one in some] + list(plain)
    model = ThroughputModel(
        LineFit.of(
            [steps for (steps, _), some in full.items() for _ in some],
            [one.draft_s for some in full.values() for one in some],
        ),
        LineFit.of([one.length for one in everything], [one.wall_s - one.draft_s for one in everything]),
        {steps: _mean_distance(full[steps, 0.0]) for steps in settings.efforts},
    )
    return ModelBench(model, tuple(_cell(model, *cell, some, settings.block) for cell, some in full.items()))


def _cell(model: ThroughputModel, steps: int, leniency: float, rounds: Sequence[RoundTrace], block: int) -> Cell:
    reached = np.concatenate([1.0 - (1.0 - leniency) * one.distance[: _num_reached(one)] for one in rounds])
    num_tokens = sum(one.num_accepted + 1 for one in rounds)
    return Cell(
        steps,
        leniency,
        len(rounds),
        float(reached.mean()),
        num_tokens / len(rounds),
        num_tokens / sum(one.wall_s for one in rounds),
        model.acceptance(steps, leniency),
        model.tokens_per_round(steps, leniency, block),
        model.tokens_per_s(steps, leniency, block),
    )


def _mean_distance(exact: Sequence[RoundTrace]) -> float:
    """d_K: mean TV(p, q) over the positions that rounds at leniency 0 reached."""
    distances = np.concatenate([one.distance[: _num_reached(one)] for one in exact])
    return mean_distance(1.0 - distances, np.ones(len(distances)), 0.0)


def _num_reached(one: RoundTrace) -> int:
    return min(one.num_accepted + 1, one.length)


def _quality(settings: Settings, steps: int, leniency: float) -> dict[str, object]:
    return {"rule": "linear", "leniency": leniency, "effort": steps, "speculation": settings.block}


def _record(
    pair: Pair,
    prompt: Prompt,
    qualities: Sequence[dict[str, object]],
    settings: Settings,
    progress: Callable[[], None],
) -> list[list[RoundTrace]]:
    """The rounds of one request per quality, in turns; without each one's first, whose calls carry the prompt."""
    options: GenerateOptions = {
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "top_p": 1.0,
        "seed": settings.seed,
        "ignore_eos": True,
    }
    with pair.recording() as requests, ExitStack() as opened:
        streams = [
            opened.enter_context(
                closing(pair.stream(prompt, quality={"tier": "high", **quality}, **cast(Any, options)))
            )
            for quality in qualities
        ]
        running = list(streams)
        while running:
            for stream in list(running):
                if next(stream, None) is None:
                    running.remove(stream)
                    progress()
    return [rounds[1:] for rounds in requests]
