"""`specdiff bench speed --sweep`: both dials, leniency λ of the linear rule and diffusion effort K, in one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdiff_dist.bench.speed import GENERATE, PLAIN, Answers, rounds_report, speedup, tokens_per_s

EFFORTS = (1, 2, 4)
LENIENCIES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
CELLS = tuple((steps, leniency) for steps in EFFORTS for leniency in LENIENCIES)
TIER = "high"  # what the cells change a copy of: the exact tier takes no leniency


@dataclass(frozen=True, slots=True)
class Point:
    """One (K, λ) as a point of the frontier: faster is better, nearer is better."""

    k: int
    leniency: float
    speedup_vs_plain: float
    mean_tv: float

    def is_matched_by(self, other: Point) -> bool:
        """Whether `other` is as fast and as near, and better in one of both."""
        at_least = other.speedup_vs_plain >= self.speedup_vs_plain and other.mean_tv <= self.mean_tv
        return at_least and (other.speedup_vs_plain > self.speedup_vs_plain or other.mean_tv < self.mean_tv)


def cell_name(steps: int, leniency: float) -> str:
    """The contender's name."""
    return f"K={steps} λ={leniency:g}"


def cell_quality(base: Mapping[str, object], steps: int, leniency: float) -> dict[str, object]:
    """The `quality` object of a cell: `base`, the linear rule, and both dials."""
    effort = base.get("effort")
    given = dict(effort) if isinstance(effort, Mapping) else {}
    return {
        "tier": TIER, **base, "rule": "linear", "leniency": leniency, "effort": {**given, "num_denoising_steps": steps},
    }  # fmt: skip


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other one matches, nearest first."""
    best = [one for one in points if not any(one.is_matched_by(other) for other in points)]
    return sorted(best, key=lambda one: (one.mean_tv, one.speedup_vs_plain))


def sweep_report(found: Mapping[str, Answers]) -> dict[str, Any]:
    """`sweep`, one object per cell over all sets together, and `frontier`: the cells that no other one matches."""
    answers = {name: [one for each in found.values() for one in each[name]] for name in next(iter(found.values()))}
    cells = [_cell(answers, steps, leniency) for steps, leniency in CELLS]
    points = [point_of(cell) for cell in cells]
    return {
        "sweep": cells,
        "frontier": [{"k": one.k, "leniency": one.leniency} for one in frontier(points)],
        "baselines": {name: {"tokens_per_s": tokens_per_s(answers[name])} for name in (GENERATE, PLAIN)},
        "num_prompts": len(answers[PLAIN]),
    }


def point_of(cell: Mapping[str, Any]) -> Point:
    return Point(cell["k"], cell["leniency"], cell["speedup_vs_plain"], cell["mean_tv"])


def _cell(answers: Answers, steps: int, leniency: float) -> dict[str, Any]:
    mine = answers[cell_name(steps, leniency)]
    return {
        "k": steps,
        "leniency": leniency,
        "speedup_vs_plain": speedup(mine, answers[PLAIN]),
        "speedup_vs_generate": speedup(mine, answers[GENERATE]),
        "tokens_per_s": tokens_per_s(mine),
        **rounds_report(mine),
    }
