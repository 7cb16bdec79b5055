"""Hard bounds on deviation: `max_tv_per_token` and `tv_budget` of a request, whatever the rule.

Where a rule's law would go further from the target than is left, the position is decided by the linear rule with the λ
that spends exactly what is left (Theorem 1: λ = budget/TV(p, q)); once nothing is left, λ = 0 and decoding is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdiff_dist.core.rows import FloatArray
from specdiff_dist.core.rules import Lossless, Rule, budget_lambda, linear_accept, linear_law
from specdiff_dist.core.support import OutputLaw, SupportRows
from specdiff_dist.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class TVLimits:
    """Total variation allowed per token, and in sum over the tokens still to come (inf: no bound)."""

    max_tv_per_token: float = math.inf
    tv_left: float = math.inf

    def __post_init__(self) -> None:
        if not (self.max_tv_per_token >= 0.0 and self.tv_left >= 0.0):
            raise InvalidConfig("max_tv_per_token and tv_budget must be 0 or more")


NO_LIMITS = TVLimits()
_ROUNDING = 1e-12  # of the sums above


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """A rule applied to a block under limits: acceptance probabilities and the exact divergence of the law they make."""

    accept_probs: FloatArray  # [nnz] for every token that could have been drafted
    tv: FloatArray  # [num_rows]
    kl: FloatArray  # [num_rows] nats
    is_limited: NDArray[np.bool_]  # [num_rows] decided by the linear rule instead


def decide(rule: Rule, rows: SupportRows, limits: TVLimits = NO_LIMITS) -> Decision:
    """Applies `rule`, holding it to `limits`.

    The budget is spent from left to right: position j is only reached after all before it, so what they spend is known.
    """
    accept_probs = rule.accept_probs(rows)
    nothing = np.zeros(rows.num_rows)
    if isinstance(rule, Lossless):
        return Decision(accept_probs, nothing, nothing, np.zeros(rows.num_rows, bool))
    law = rule.output_law(rows, accept_probs)
    tv, kl = law.divergence(rows)
    if limits == NO_LIMITS:
        return Decision(accept_probs, tv, kl, np.zeros(rows.num_rows, bool))
    wanted = np.minimum(tv, limits.max_tv_per_token)
    allowed = np.diff(np.minimum(np.cumsum(wanted), limits.tv_left), prepend=0.0)
    is_limited = allowed < tv - _ROUNDING
    if is_limited.any():
        lambdas = budget_lambda(rows, np.maximum(allowed, 0.0))
        entries = is_limited[rows.row_index]
        linear = linear_law(rows, lambdas)
        accept_probs = np.where(entries, linear_accept(rows, lambdas), accept_probs)
        law = OutputLaw(
            np.where(entries, linear.on_support, law.on_support),
            np.where(is_limited, linear.outside_scale, law.outside_scale),
        )
        tv, kl = law.divergence(rows)
    return Decision(accept_probs, tv, kl, is_limited)
