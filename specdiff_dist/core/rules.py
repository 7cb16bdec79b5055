"""Acceptance rules, as values. Leniency 0 is exact for every rule; larger is looser.

A rule replaces the target law at a position by a conditional target p̃ and then runs the standard scheme: accept a draft
token y ~ q with probability min(1, p̃(y)/q(y)), else draw from norm([p̃ - q]+).
Sources: Leviathan et al. 2023 (lossless); "Speculative Diffusion is a Tale of Two Tradeoffs", linear rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdiff_dist.core.rows import FloatArray
from specdiff_dist.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class Lossless:
    """p̃ = p: the output law is the target's."""

    @property
    def leniency(self) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Linear:
    """p̃ = (1-λ)p + λq. Accepts with min(1, (1-λ)p/q + λ); [p̃ - q]+ = (1-λ)[p - q]+, so the residual is norm([p - q]+)
    for every λ < 1, and λ = 1 accepts everything. Output law p̃, at distance TV(p̃, p) = λ·TV(p, q)."""

    leniency: float  # λ

    def __post_init__(self) -> None:
        if not 0.0 <= self.leniency <= 1.0:
            raise InvalidConfig(f"the linear rule's leniency must be in [0, 1], not {self.leniency}")


Rule = Lossless | Linear


def accept_ratios(rule: Rule, target_probs: FloatArray, draft_probs: FloatArray) -> FloatArray:
    """p̃(y)/q(y) at the draft tokens; both inputs float64 [d], `draft_probs` > 0. Returns [d], may exceed 1."""
    ratios = target_probs / draft_probs
    if isinstance(rule, Linear):
        ratios = (1.0 - rule.leniency) * ratios + rule.leniency
    return ratios


def law_divergence(
    rule: Rule, target_on_support: FloatArray, draft_probs: FloatArray, row_index: np.ndarray, num_rows: int
) -> tuple[FloatArray, FloatArray]:
    """TV and KL (nats) of the law really sampled against the target, per position: ([num_rows], [num_rows]).

    Needs the target only on the proposals' support (entries [nnz], `row_index` [nnz] says whose), because outside it
    q = 0 and p̃ = (1-λ)p:  TV = λ·Σ[q - p]+,  KL = Σ_supp p̃ ln(p̃/p) + (1-λ) ln(1-λ) (1 - p(supp)).
    KL is inf where q leaves a truncated target's support.
    """
    leniency = rule.leniency
    if leniency == 0.0 or num_rows == 0:  # (bincount of nothing would be integers)
        return np.zeros(num_rows), np.zeros(num_rows)
    excess = np.maximum(draft_probs - target_on_support, 0.0)
    tv = leniency * np.bincount(row_index, weights=excess, minlength=num_rows)
    mixed = (1.0 - leniency) * target_on_support + leniency * draft_probs
    with np.errstate(divide="ignore"):
        terms = mixed * np.log(mixed / target_on_support)  # mixed ≥ λq > 0; p = 0 gives inf
    kl = np.bincount(row_index, weights=terms, minlength=num_rows)
    if leniency < 1.0:
        outside = np.maximum(1.0 - np.bincount(row_index, weights=target_on_support, minlength=num_rows), 0.0)
        kl += (1.0 - leniency) * np.log1p(-leniency) * outside
    return tv, np.maximum(kl, 0.0)
