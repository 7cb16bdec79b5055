"""The learning rate over a run whose length is given in steps, or in minutes and found by measuring."""

from __future__ import annotations

import math
from dataclasses import dataclass

NUM_MEASURED = 6  # steps whose speed decides how many fit into the time


@dataclass(frozen=True, slots=True)
class Schedule:
    """Warm-up, then a cosine to 0 at `num_steps`. While `num_steps` is unknown only warm-up steps may be taken."""

    num_steps: int | None
    warmup_steps: int

    def factor(self, step: int) -> float:
        """Of the peak learning rate, for step 0, 1, …"""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        assert self.num_steps is not None
        progress = (step - self.warmup_steps) / max(self.num_steps - self.warmup_steps, 1)
        return 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))


def steps_that_fit(remaining_s: float, seconds_per_step: float, *, done: int, at_least: int) -> int:
    """Length of a run that has taken `done` steps and has so much time left."""
    return max(done + int(remaining_s / max(seconds_per_step, 1e-9)), at_least)
