"""Hand-made rounds for traces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdiff_dist.core.throughput import LineFit
from specdiff_dist.simulate.costs import Costs
from specdiff_dist.simulate.trace import RoundTrace

COSTS = Costs(LineFit(1.0, 0.0), LineFit(10.0, 1.0))  # a draft call 1 s, a verify call 10 s + 1 s a token


def made_round(
    target: Sequence[float],
    *,
    confidence: Sequence[float] | None = None,
    draft: Sequence[float] | None = None,
    uniforms: Sequence[float] | None = None,
    num_accepted: int = 0,
    num_calls: int = 1,
    draft_s: float = 1.0,
    verify_s: float = 10.0,
    wall_s: float = 11.5,
) -> RoundTrace:
    """A round with p(y) = `target`, q(y) = `draft` (default 1), confidences and uniforms (default .5) given."""
    d = len(target)
    q = np.asarray(confidence if confidence is not None else [0.5] * d, np.float64)
    return RoundTrace(
        token_probs=q,
        max_probs=q,
        sum_squares=q**2,
        target_at_token=np.asarray(target, np.float64),
        draft_at_token=np.asarray(draft if draft is not None else [1.0] * d, np.float64),
        distance=1.0 - np.asarray(target, np.float64),
        accept_uniforms=np.asarray(uniforms if uniforms is not None else [0.5] * d, np.float64),
        num_accepted=num_accepted,
        num_drafted=d,
        num_draft_calls=num_calls if d else 0,
        draft_s=draft_s if d else 0.0,
        verify_s=verify_s,
        wall_s=wall_s,
    )
