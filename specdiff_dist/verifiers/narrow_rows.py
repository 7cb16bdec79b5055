"""Target rows of many sessions at once, where few tokens are left of each: greedy ones, and those with a small top-k.

What target_rows.py does call by call takes a third of a round's time where sixteen sessions sample. Here the device looks for the largest
logits of all rows in one operation, and only those leave it. A row's numbers do not depend on the rows beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdiff_dist.core.rows import FloatArray, SparseRows
from specdiff_dist.types import MAX_NARROW_SUPPORT, SamplingParams


def can_be_narrow(sampling: SamplingParams, vocab_size: int) -> bool:
    """Whether `narrow_rows` is for requests like this."""
    return sampling.is_greedy or 0 < sampling.top_k <= min(MAX_NARROW_SUPPORT, vocab_size - 1)


def narrow_rows(logits: Tensor, counts: Sequence[int], sampling: SamplingParams) -> list[SparseRows | None]:
    """The law of every call's rows, as target_rows.py defines it; None for a call to be looked at by itself: a row is broken
    (NaN, infinite), or tied at the k-th logit.

    Args:
        logits: float32 [Σ counts, V] on any device, unprocessed; counts: rows of each call, at least 1 each.
        sampling: one that `can_be_narrow`.
    """
    if sampling.is_greedy:
        best = torch.argmax(logits, dim=-1)  # NaN wins
        largest = logits.gather(1, best[:, None])[:, 0]
        is_fine = torch.isfinite(largest).cpu().numpy()
        tokens = best.to(torch.int32).cpu().numpy()
        return [
            SparseRows.one_hot(tokens[rows]) if is_fine[rows].all() else None for rows in _slices(counts)
        ]  # fmt: skip
    top = torch.topk(logits, sampling.top_k + 1, dim=-1)
    values, ids = top.values.cpu().numpy(), top.indices.cpu().numpy()
    scaled = values if sampling.temperature == 1.0 else values / np.float32(sampling.temperature)
    is_fine = np.isfinite(scaled[:, 0]) & (scaled[:, -1] < scaled[:, -2])
    scaled, ids = scaled[:, :-1], ids[:, :-1]
    by_token = np.argsort(ids, axis=-1)
    ids, scaled = np.take_along_axis(ids, by_token, -1), np.take_along_axis(scaled, by_token, -1)
    with np.errstate(invalid="ignore"):  # of broken rows, which nobody looks at
        largest = scaled.max(axis=-1, keepdims=True)
        weights = np.exp(scaled - largest)
        if sampling.min_p > 0.0:
            weights[scaled < largest + np.float32(math.log(sampling.min_p))] = 0.0
        probs = (weights / weights.sum(axis=-1, keepdims=True, dtype=np.float64)).astype(np.float32)
        if sampling.top_p < 1.0:
            probs = _top_p(probs, sampling.top_p)
    kept = probs > 0.0
    return [
        SparseRows(
            np.append(0, np.cumsum(np.count_nonzero(kept[rows], axis=-1))), ids[rows][kept[rows]].astype(np.int32),
            probs[rows][kept[rows]],
        )
        if is_fine[rows].all() else None
        for rows in _slices(counts)
    ]  # fmt: skip


def _top_p(probs: np.ndarray, top_p: float) -> np.ndarray:
    """Keeps a token when the more probable ones before it, of equal ones those with lower ids, hold less than top_p of the row.
    float32 [n, k] by token id; dropped ones become 0."""
    exact: FloatArray = probs.astype(np.float64)
    order = np.argsort(-exact, axis=-1, kind="stable")
    ranked = np.take_along_axis(exact, order, -1)
    kept = np.cumsum(ranked, axis=-1) - ranked < top_p * exact.sum(axis=-1, keepdims=True)
    left = np.zeros_like(exact)
    np.put_along_axis(left, order, np.where(kept, ranked, 0.0), -1)
    return (left / left.sum(axis=-1, keepdims=True)).astype(np.float32)


def _slices(counts: Sequence[int]) -> list[slice]:
    ends = np.cumsum(counts).tolist()
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
