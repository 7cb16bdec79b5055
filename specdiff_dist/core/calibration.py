"""Acceptance probabilities learned while serving: what a drafter's confidence at a position is worth."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdiff_dist.core.rows import FloatArray
from specdiff_dist.errors import InvalidConfig

CalibrationTable = tuple[tuple[float, ...], ...]
NUM_BINS = 16
MAX_POSITIONS = 64
CENTRES = (np.arange(NUM_BINS) + 0.5) / NUM_BINS  # of the bins of confidence
MEAN_STRENGTH = 16.0  # tokens that the mean acceptance of a half is worth before any round
PRIOR_STRENGTH = 4.0  # pseudo-rounds that trust the confidence itself
DECAY = 0.998  # per observed round: old traffic is forgotten over about 500 rounds


class AcceptanceCalibration:
    """Binned calibration: P(accepted | reached, confidence bin, position), shared by the sessions of one drafter.

    A bin shrinks towards the same confidence at all positions, which shrinks towards the confidence itself, so sparse
    bins stay sensible. Only positions that were really reached (tested) count.
    """

    def __init__(self, prior: CalibrationTable = ()) -> None:
        """prior: [positions][NUM_BINS], what the drafter's training found (DrafterInfo.calibration): bins shrink towards it
        instead of towards the confidence. Raises InvalidConfig."""
        check_table(prior, what="prior")
        self._prior = np.asarray(prior, np.float64)
        self._counts = np.zeros((2, MAX_POSITIONS, NUM_BINS))  # tried, accepted

    def estimate(self, confidences: FloatArray) -> FloatArray:
        """Acceptance probabilities given reached, [n] for the n draft positions in order."""
        bins = bins_of(confidences)
        expected = read_table(confidences, self._prior) if len(self._prior) else confidences
        tried, accepted = self._counts.sum(1)[:, bins]
        overall = (accepted + PRIOR_STRENGTH * expected) / (tried + PRIOR_STRENGTH)
        tried, accepted = self._counts[:, _positions(len(confidences)), bins]
        return (accepted + PRIOR_STRENGTH * overall) / (tried + PRIOR_STRENGTH)

    def mean(self, num_positions: int) -> FloatArray:
        """Acceptance by position, whatever the confidence: for tokens that are not drafted yet. [num_positions].

        Drafting stops where this says that it does not pay, so a few unlucky rounds must not say so: the prior of a half is
        worth MEAN_STRENGTH tokens."""
        tried, accepted = self._counts.sum(2)
        overall = (accepted.sum() + MEAN_STRENGTH * 0.5) / (tried.sum() + MEAN_STRENGTH)
        per_position = (accepted + PRIOR_STRENGTH * overall) / (tried + PRIOR_STRENGTH)
        return per_position[_positions(num_positions)]

    def observe(self, confidences: FloatArray, num_verified: int, num_accepted: int) -> None:
        """Learns from one round: of `num_verified` tokens `num_accepted` were kept; the next one, if any, was rejected."""
        num_reached = min(num_accepted + 1, num_verified)
        self._counts *= DECAY
        positions, bins = _positions(num_reached), bins_of(confidences[:num_reached])
        np.add.at(self._counts[0], (positions, bins), 1.0)
        np.add.at(self._counts[1], (positions[:num_accepted], bins[:num_accepted]), 1.0)


def read_table(confidences: FloatArray, table: FloatArray) -> FloatArray:
    """Acceptance given reached that `table` [positions, NUM_BINS] says of the confidences [n] of a block's positions in
    order: by straight lines between the bins' centres; positions beyond the table take its last row."""
    rows = np.minimum(np.arange(len(confidences)), len(table) - 1)
    steps = np.minimum(np.maximum(confidences * NUM_BINS - 0.5, 0.0), NUM_BINS - 1.0)  # from the first centre, in bins
    left = np.minimum(steps.astype(np.int64), NUM_BINS - 2)
    below, above = table[rows, left], table[rows, left + 1]
    return below + (steps - left) * (above - below)


def check_table(table: CalibrationTable, *, what: str) -> None:
    """Raises InvalidConfig for what is no calibration table: [positions][NUM_BINS], 0 … 1, not falling in a row."""
    wrong = len(table) > MAX_POSITIONS or any(len(row) != NUM_BINS for row in table)
    if not wrong and len(table):
        values = np.asarray(table, np.float64)
        wrong = not (np.all((values >= 0.0) & (values <= 1.0)) and np.all(np.diff(values, axis=1) >= 0.0))
    if wrong:
        raise InvalidConfig(
            f"{what}: a calibration table has at most {MAX_POSITIONS} rows of {NUM_BINS} numbers, 0 … 1, none falling"
        )


def bins_of(confidences: NDArray[np.floating]) -> NDArray[np.int64]:
    """Which of the NUM_BINS equal bins each confidence, 0 … 1, falls into."""
    return np.minimum(np.maximum(confidences, 0.0) * NUM_BINS, NUM_BINS - 1).astype(np.int64)


def _positions(count: int) -> NDArray[np.int64]:
    """Rows of the tables that the first `count` draft positions belong to."""
    return np.minimum(np.arange(count), MAX_POSITIONS - 1)
