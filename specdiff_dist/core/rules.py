"""Acceptance rules, as values. Leniency 0 is exact for every rule; larger is looser and never accepts less.

All rules follow one scheme. A draft token y ~ q is accepted with probability `accept_probs(y)`; at the first rejection
the recovered token is drawn from norm([s·p - q]+), where s is the rule's `residual_scale` for the rejected y (1 for all
rules but Cactus). `output_law` is the exact law of the token emitted at a position, given that it is reached.

    rule          leniency  accepts y with                                    law
    Lossless      -         min(1, p/q)                                       p
    Linear        λ [0, 1]  min(1, (1-λ)p/q + λ)                              (1-λ)p + λq
    TVBudget      ε [0, 1]  Linear with λ = min(1, ε/TV(p, q)) per position   at distance min(ε, TV(p, q)) from p
    Cactus        δ ≥ 0     min(1, γ/q), γ from the KL budget δ               see `Cactus`
    Lenience      1-ℓ       min(1, p/(ℓq))                                    ≤ p/ℓ everywhere
    Typical       [0, 1]    1 if p > min(ε, α·exp(-H))/leniency, else p/q     see `Typical`

Sources: Leviathan et al. 2023 (lossless, lenience in App. A.5); "Speculative Diffusion is a Tale of Two Tradeoffs"
(linear, Theorem 1, modified Cactus in App. E); Cactus, arXiv 2604.04987; Medusa (typical acceptance).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdiff_dist.core.cactus import exact_gamma, taylor_gamma
from specdiff_dist.core.cactus_residuals import cactus_residuals
from specdiff_dist.core.rows import FloatArray
from specdiff_dist.core.support import OutputLaw, SupportRows
from specdiff_dist.errors import InvalidConfig


def _check_leniency(rule: object, leniency: float, highest: float = 1.0) -> None:
    if not 0.0 <= leniency <= highest:  # false for NaN
        raise InvalidConfig(f"the leniency of {type(rule).__name__} must be in [0, {highest:g}], not {leniency}")


@dataclass(frozen=True, slots=True)
class Lossless:
    """The output law is the target's."""

    @property
    def leniency(self) -> float:
        return 0.0

    def accept_probs(self, rows: SupportRows) -> FloatArray:
        return np.minimum(rows.target_probs / rows.draft_probs, 1.0)

    def output_law(self, rows: SupportRows, accept_probs: FloatArray) -> OutputLaw:
        return OutputLaw(rows.target_probs, np.ones(rows.num_rows))

    def residual_scale(self, target_prob: float) -> float:
        return 1.0


@dataclass(frozen=True, slots=True)
class Linear:
    """p̃ = (1-λ)p + λq. [p̃ - q]+ = (1-λ)[p - q]+, so the residual is norm([p - q]+) for every λ < 1 and λ = 1 accepts
    everything. At temperature 0 this is the literal rule: a mismatch is accepted with probability λ."""

    leniency: float  # λ

    def __post_init__(self) -> None:
        _check_leniency(self, self.leniency)

    def accept_probs(self, rows: SupportRows) -> FloatArray:
        return linear_accept(rows, np.full(rows.num_rows, self.leniency))

    def output_law(self, rows: SupportRows, accept_probs: FloatArray) -> OutputLaw:
        return linear_law(rows, np.full(rows.num_rows, self.leniency))

    def residual_scale(self, target_prob: float) -> float:
        return 1.0


@dataclass(frozen=True, slots=True)
class TVBudget:
    """Linear with the largest λ whose law stays within total variation ε of the target at every position (Theorem 1)."""

    leniency: float  # ε

    def __post_init__(self) -> None:
        _check_leniency(self, self.leniency)

    def _lambdas(self, rows: SupportRows) -> FloatArray:
        return budget_lambda(rows, np.full(rows.num_rows, self.leniency))

    def accept_probs(self, rows: SupportRows) -> FloatArray:
        return linear_accept(rows, self._lambdas(rows))

    def output_law(self, rows: SupportRows, accept_probs: FloatArray) -> OutputLaw:
        return linear_law(rows, self._lambdas(rows))

    def residual_scale(self, target_prob: float) -> float:
        return 1.0


@dataclass(frozen=True, slots=True)
class Cactus:
    """Raises the drafted token's own probability from p(y) to γ within a KL budget of δ nats: p̃_y(y) = γ and
    p̃_y(v) = s·p(v) elsewhere, s = (1-γ)/(1-p(y)). `gamma` "exact" spends δ exactly, "taylor" is as published.

    KL(p̃_y ‖ p) ≤ δ bounds the *conditional* target, not the output law, which mixes the p̃_y over y: for p = (.5, .3, .15,
    .05), q = (.1, .2, .3, .4), δ = .25 the law is at KL .393. The receipt reports the law.
    """

    leniency: float  # δ, nats
    gamma: str = "exact"

    def __post_init__(self) -> None:
        _check_leniency(self, self.leniency, 1e3)
        if self.gamma not in ("exact", "taylor"):
            raise InvalidConfig(f"gamma must be 'exact' or 'taylor', not {self.gamma!r}")

    def _gamma(self, target_probs: FloatArray) -> FloatArray:
        if self.gamma == "taylor":
            return taylor_gamma(target_probs, self.leniency)
        return exact_gamma(target_probs, self.leniency)[0]

    def accept_probs(self, rows: SupportRows) -> FloatArray:
        accept_probs = np.ones(len(rows.draft_probs))
        undecided = np.flatnonzero(rows.target_probs < rows.draft_probs)  # elsewhere γ ≥ p ≥ q
        gamma = self._gamma(rows.target_probs[undecided])
        accept_probs[undecided] = np.minimum(gamma / rows.draft_probs[undecided], 1.0)
        return accept_probs

    def residual_scale(self, target_prob: float) -> float:
        gamma = float(self._gamma(np.array([target_prob]))[0])
        return (1.0 - gamma) / (1.0 - target_prob) if target_prob < 1.0 else 0.0

    def output_law(self, rows: SupportRows, accept_probs: FloatArray) -> OutputLaw:
        """law(v) = q(v)a(v) + Σ_y q(y)(1-a(y)) [s_y p(v) - q(v)]+ / Z_y. A rejected y has s_y p(y) ≤ γ_y < q(y), so it is
        never among its own residual's tokens and needs no exception; and its γ_y is q(y)a(y)."""
        p, accepted = rows.target_probs, rows.draft_probs * accept_probs
        y = np.flatnonzero(accept_probs < 1.0)
        scale = (1.0 - accepted[y]) / (1.0 - p[y])  # p < γ < 1
        on_support, outside = cactus_residuals(rows, y, scale, rows.draft_probs[y] - accepted[y])
        return OutputLaw(accepted + on_support, outside)


@dataclass(frozen=True, slots=True)
class Lenience:
    """Accepts with min(1, p/(ℓq)), ℓ = 1 - leniency; the law is nowhere more than p/ℓ."""

    leniency: float  # 1 - ℓ

    def __post_init__(self) -> None:
        _check_leniency(self, self.leniency)
        if self.leniency == 1.0:
            raise InvalidConfig("Lenience needs a leniency below 1 (ℓ = 0 would accept anything possible)")

    def accept_probs(self, rows: SupportRows) -> FloatArray:
        return np.minimum(rows.target_probs / ((1.0 - self.leniency) * rows.draft_probs), 1.0)

    def output_law(self, rows: SupportRows, accept_probs: FloatArray) -> OutputLaw:
        return _residual_law(rows, accept_probs)

    def residual_scale(self, target_prob: float) -> float:
        return 1.0


@dataclass(frozen=True, slots=True)
class Typical:
    """Typical acceptance: y is accepted outright if p(y) > min(ε, α·exp(-H(p))) / leniency, else as in Lossless.

    leniency 1 has Medusa's threshold, leniency 0 none, so the rule has an exact end and only ever adds acceptances;
    Medusa itself replaces a failed token by the argmax instead of drawing from the residual.
    """

    leniency: float
    epsilon: float = 0.09
    alpha: float = 0.3

    def __post_init__(self) -> None:
        _check_leniency(self, self.leniency)
        if not (0.0 < self.epsilon <= 1.0 and 0.0 < self.alpha <= 1.0):
            raise InvalidConfig(f"epsilon and alpha must be in (0, 1], not {self.epsilon} and {self.alpha}")

    def accept_probs(self, rows: SupportRows) -> FloatArray:
        lossless = np.minimum(rows.target_probs / rows.draft_probs, 1.0)
        threshold = np.minimum(self.epsilon, self.alpha * np.exp(-rows.entropy))
        return np.where(self.leniency * rows.target_probs > rows.spread(threshold), 1.0, lossless)

    def output_law(self, rows: SupportRows, accept_probs: FloatArray) -> OutputLaw:
        return _residual_law(rows, accept_probs)

    def residual_scale(self, target_prob: float) -> float:
        return 1.0


Rule = Lossless | Linear | TVBudget | Cactus | Lenience | Typical


def needs_rows(rule: Rule) -> bool:
    """Whether a recovered token may depend on more than the position: wide target rows must then be held."""
    return isinstance(rule, Cactus)


def needs_entropy(rule: Rule) -> bool:
    """Whether the rule asks for whole target rows, which wide replies do not carry."""
    return isinstance(rule, Typical) and rule.leniency > 0.0


def budget_lambda(rows: SupportRows, tv_budget: FloatArray) -> FloatArray:
    """The λ whose linear law lies `tv_budget` [num_rows] from the target: min(1, budget/TV(p, q)) (Theorem 1)."""
    tv = rows.total_variation
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(tv > tv_budget, tv_budget / tv, 1.0)


def linear_accept(rows: SupportRows, lambdas: FloatArray) -> FloatArray:
    share = rows.spread(lambdas)
    return np.minimum((1.0 - share) * (rows.target_probs / rows.draft_probs) + share, 1.0)


def linear_law(rows: SupportRows, lambdas: FloatArray) -> OutputLaw:
    share = rows.spread(lambdas)
    return OutputLaw((1.0 - share) * rows.target_probs + share * rows.draft_probs, 1.0 - lambdas)


def _residual_law(rows: SupportRows, accept_probs: FloatArray) -> OutputLaw:
    """Law of any rule that recovers from norm([p - q]+): q·a + P(reject)·[p - q]+/TV(p, q)."""
    accepted = rows.draft_probs * accept_probs
    tv = rows.total_variation
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = np.where(tv > 0.0, np.maximum(1.0 - rows.sum(accepted), 0.0) / tv, 0.0)
    return OutputLaw(accepted + rows.spread(scale) * np.maximum(rows.target_probs - rows.draft_probs, 0.0), scale)
