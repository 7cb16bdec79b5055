"""Where the Cactus rule's rejected tokens go: every rejected token has a residual of its own, [s·p - q]+."""

from __future__ import annotations

import numpy as np

from specdiff_dist.core.rows import FloatArray, IndexArray
from specdiff_dist.core.support import SupportRows


def cactus_residuals(
    rows: SupportRows, rejected: IndexArray, scale: FloatArray, mass: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Σ_y mass_y · [s_y p - q]+ / Z_y over the rejected tokens y of each row: `(on_support [nnz], outside [num_rows])`,
    where `outside` is the factor on p outside the proposals' support.

    v is in y's residual iff q(v)/p(v) < s_y: with a row's tokens in the order of that ratio it is a prefix of them, so
    all Z_y, and what all y give to a v, are differences of running sums: n tokens cost n log n, not n².

    Args:
        rejected: [m] entries of the support that may be rejected; scale: [m] s_y ≤ 1; mass: [m] q(y)(1 - a(y)).
    """
    receiving = np.flatnonzero(rows.target_probs > rows.draft_probs)  # no others, as s ≤ 1
    row_of, row = rows.row_index[receiving], rows.row_index[rejected]
    # The ratio is below 1: adding twice the row number sorts by row first.
    ratio = rows.draft_probs[receiving] / rows.target_probs[receiving]
    key = 2.0 * row_of + ratio
    order = np.argsort(key)
    p, q = rows.target_probs[receiving[order]], rows.draft_probs[receiving[order]]
    sum_p, sum_q = np.concatenate([[0.0], np.cumsum(p)]), np.concatenate([[0.0], np.cumsum(q)])
    first = np.searchsorted(row_of, np.arange(rows.num_rows))[row]
    stop = np.searchsorted(key[order], 2.0 * row + scale)  # y's residual is first … stop-1
    residual = scale * (sum_p[stop] - sum_p[first] + rows.outside_mass[row]) - (sum_q[stop] - sum_q[first])  # Z_y
    # Z_y = TV(p̃_y, q) ≥ q(y) - γ_y = mass_y; less than that is rounding.
    share = np.where(mass > 0.0, mass / np.maximum(residual, mass), 0.0)

    def received(weights: FloatArray) -> FloatArray:
        """Sum of the weights of the y whose residual has the token, for those receiving, in order."""
        length = len(receiving) + 1
        return np.cumsum(np.bincount(first, weights, length) - np.bincount(stop, weights, length))[:-1]

    on_support = np.zeros(len(rows.target_probs))
    on_support[receiving[order]] = np.maximum(p * received(share * scale) - q * received(share), 0.0)
    return on_support, np.bincount(row, share * scale, rows.num_rows)
