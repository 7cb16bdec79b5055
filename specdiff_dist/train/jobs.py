"""What a batch is asked to write, and what it wrote."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdiff_dist.core.rows import IntArray


@dataclass(frozen=True, slots=True)
class Job:
    """A text to continue."""

    label: object  # the caller's own
    token_ids: IntArray  # at least one
    temperature: float  # 0 is greedy
    top_p: float
    stream: tuple[int, int]  # names its random numbers, next to the seed


@dataclass(frozen=True, slots=True)
class Written:
    """A job's continuation."""

    job: Job
    token_ids: IntArray  # int32 [t], with the token that ended it
    has_ended: bool  # not cut at the limit
    top_ids: IntArray  # int32 [t, TOP], the verifier's most probable tokens where each token was drawn, descending
    top_log_probs: np.ndarray  # float16 [t, TOP], natural logarithms at temperature 1
