"""What an acceptance rule gets to see: target and proposal on the proposals' support."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from specdiff_dist.core.rows import FloatArray, SparseRows, find


@dataclass(frozen=True, eq=False)
class SupportRows:
    """p (target) and q (proposal) at every token that could have been drafted, for `num_rows` positions.

    Outside a proposal's support q = 0, so a rule acts there on p by a factor alone and `outside_mass` is all it needs:
    every acceptance test, and every law's TV and KL, follow from these few numbers, however wide the target is.
    """

    target_probs: FloatArray  # [nnz] p, > or = 0
    draft_probs: FloatArray  # [nnz] q > 0
    row_index: NDArray[np.int64]  # [nnz] whose entry
    num_rows: int
    entropy: FloatArray  # [num_rows] of the whole target row, nats

    @staticmethod
    def of(
        proposals: SparseRows, target: SparseRows, target_mass: FloatArray, entropy: FloatArray | None = None
    ) -> SupportRows:
        """Looks the target, its rows divided by `target_mass`, up on the proposals' support. `entropy`: see the field;
        only the typical rule needs it."""
        row_index = proposals.row_index()
        at, is_there = find(target, row_index, proposals.token_ids)
        target_probs = np.where(is_there, target.probs.take(at, mode="clip") / target_mass[row_index], 0.0)
        entropy = np.zeros(proposals.num_rows) if entropy is None else entropy
        return SupportRows(target_probs, proposals.normalised(), row_index, proposals.num_rows, entropy)

    def sum(self, values: FloatArray) -> FloatArray:
        """Sum of entries per row: [nnz] -> [num_rows]."""
        return np.bincount(self.row_index, weights=values, minlength=self.num_rows).astype(np.float64)

    def spread(self, per_row: FloatArray) -> FloatArray:
        """One value per row at every entry: [num_rows] -> [nnz]."""
        return per_row[self.row_index]

    @cached_property
    def outside_mass(self) -> FloatArray:
        """[num_rows] target probability outside the support."""
        return np.maximum(1.0 - self.sum(self.target_probs), 0.0)

    @cached_property
    def total_variation(self) -> FloatArray:
        """[num_rows] TV(p, q) = Σ [q - p]+."""
        return self.sum(np.maximum(self.draft_probs - self.target_probs, 0.0))


@dataclass(frozen=True, slots=True, eq=False)
class OutputLaw:
    """The law really sampled at each position: `on_support` [nnz] there, `outside_scale` [num_rows] times p elsewhere."""

    on_support: FloatArray
    outside_scale: FloatArray

    def divergence(self, rows: SupportRows) -> tuple[FloatArray, FloatArray]:
        """TV and KL (nats) to the target per position: ([num_rows], [num_rows]). KL is inf where the law leaves the
        support of a truncated target."""
        scale, p, law = self.outside_scale, rows.target_probs, self.on_support
        tv = 0.5 * (rows.sum(np.abs(law - p)) + np.abs(scale - 1.0) * rows.outside_mass)
        with np.errstate(divide="ignore", invalid="ignore"):
            inside = np.where(law > 0.0, law * np.log(law / p), 0.0)
            outside = np.where(scale > 0.0, scale * np.log(scale), 0.0)
        kl = rows.sum(inside) + rows.outside_mass * outside
        return tv, np.maximum(kl, 0.0)
