"""From a drafter's confidence to the probability that the token is accepted, by block position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdiff_dist.core.calibration import CENTRES, NUM_BINS, bins_of, read_table
from specdiff_dist.train.evaluation import Outcomes, calibration_error

_STRENGTH = 20.0  # pseudo-observations with which a sparse bin leans on all positions together
_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """P(match | reached, confidence) over 16 equal confidence bins; never falling in the confidence.

    table: [B, 16], read at the bins' centres and in between by straight lines.
    """

    table: _Floats
    ece_before: float  # both errors on answers it was not fitted on
    ece_after: float
    ece_by_position: list[float]

    def as_json(self) -> dict[str, Any]:
        """What config.json keeps under "calibration"."""
        return {
            "kind": "isotonic",
            "num_bins": NUM_BINS,
            "table": [[round(float(value), 4) for value in row] for row in self.table],
            "ece_before": round(self.ece_before, 4),
            "ece_after": round(self.ece_after, 4),
            "ece_by_position": [round(value, 4) for value in self.ece_by_position],
        }


def fit(outcomes: Outcomes) -> Calibration:
    """Fits on all answers; the errors are of tables fitted on every second answer, each measured on the other half. Only
    reached positions count, as in decoding."""
    calibrated: _Floats = outcomes.confidence.astype(np.float64)
    for half in (0, 1):
        is_own = outcomes.answer % 2 == half
        table = _fit_table(_of(outcomes, is_own))
        for row in np.flatnonzero(~is_own):
            calibrated[row] = read_table(calibrated[row], table)
    reached, match = outcomes.is_reached, outcomes.is_match
    return Calibration(
        _fit_table(outcomes),
        ece_before=calibration_error(outcomes.confidence[reached], match[reached]),
        ece_after=calibration_error(calibrated[reached], match[reached]),
        ece_by_position=[
            calibration_error(calibrated[reached[:, j], j], match[reached[:, j], j]) for j in range(reached.shape[1])
        ],
    )


def _fit_table(outcomes: Outcomes) -> _Floats:
    bins = bins_of(outcomes.confidence)
    reached, match = outcomes.is_reached, outcomes.is_match
    num_positions = reached.shape[1]
    tried, matched = np.zeros((num_positions, NUM_BINS)), np.zeros((num_positions, NUM_BINS))
    for position in range(num_positions):
        at = reached[:, position]
        tried[position] = np.bincount(bins[at, position], minlength=NUM_BINS)
        matched[position] = np.bincount(bins[at, position], weights=match[at, position], minlength=NUM_BINS)
    # A bin that nothing fell into leans on the confidence itself.
    overall = (matched.sum(axis=0) + CENTRES) / (tried.sum(axis=0) + 1.0)
    rates = (matched + _STRENGTH * overall) / (tried + _STRENGTH)
    return np.stack([isotonic(row, weights) for row, weights in zip(rates, tried + 1.0, strict=True)])


def isotonic(values: _Floats, weights: _Floats) -> _Floats:
    """The non-falling sequence nearest to `values` in weighted squares (pool adjacent violators)."""
    means: list[float] = []
    sizes: list[float] = []
    counts: list[int] = []
    for value, weight in zip(values, weights, strict=True):
        means.append(float(value))
        sizes.append(float(weight))
        counts.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            size = sizes[-2] + sizes[-1]
            means[-2:] = [(means[-2] * sizes[-2] + means[-1] * sizes[-1]) / size]
            sizes[-2:] = [size]
            counts[-2:] = [counts[-2] + counts[-1]]
    return np.repeat(means, counts)


def _of(outcomes: Outcomes, rows: NDArray[np.bool_]) -> Outcomes:
    return Outcomes(**{name: getattr(outcomes, name)[rows] for name in Outcomes.__slots__})
