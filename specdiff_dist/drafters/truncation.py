"""Temperature, top-k and top-p on a drafter's candidates: what is left is the proposal, exactly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdiff_dist.core.rows import SparseRows
from specdiff_dist.types import SamplingParams


def truncated_rows(
    token_ids: NDArray[np.integer], logits: NDArray[np.floating], sampling: SamplingParams
) -> SparseRows:
    """Proposal rows from each row's largest logits. Both arrays: [k, c], logits descending, c = draft_top_k or all.

    Same order as for the target: temperature, top-k (ties at the k-th stay), top-p after top-k. Greedy: one-hot at the
    first candidate. Entries that underflow float32 are dropped.
    """
    if sampling.is_greedy:
        return SparseRows.one_hot(token_ids[:, 0])
    num_candidates = logits.shape[1]
    scaled = logits.astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled[:, :1])
    if 0 < sampling.top_k < num_candidates:
        weights[logits < logits[:, sampling.top_k - 1 : sampling.top_k]] = 0.0
    if sampling.top_p < 1.0:
        probs = weights / weights.sum(axis=1, keepdims=True)
        before = np.cumsum(probs, axis=1) - probs
        before[:, 0] = 0.0
        weights[before >= sampling.top_p] = 0.0
    probs = weights / weights.sum(axis=1, keepdims=True)
    return SparseRows.from_rows([(ids, row) for ids, row in zip(token_ids, probs, strict=True)])
