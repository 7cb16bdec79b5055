"""Log-probabilities that a request asked for: the target's own log-softmax, of the raw logits.

Raw, as vLLM's default: before penalties, biases, temperature and truncation. So a token's value says what the model thinks
of it, and is the same whatever drafted it or accepted it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdiff_dist.core.rows import IntArray, SparseRows
from specdiff_dist.errors import InvalidRows

MAX_LOGPROBS = 20  # most probable tokens a request may ask for, per position


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """What is reported of one generated token."""

    logprob: float  # -inf possible
    top_token_ids: tuple[int, ...]  # the most probable tokens there, best first
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TargetLogprobs:
    """Of d + 1 target rows: the most probable tokens, and every token that can come of the position.

    Which one does is decided after the reply, so narrow rows bring `entries` (a recovered or bonus token is one of
    them), wide rows `recovered` and `plain`; a token drawn later brings its own (ResolvedToken).
    """

    top_token_ids: IntArray  # int32 [d + 1, n], best first
    top: NDArray[np.float32]  # [d + 1, n]
    draft: NDArray[np.float32]  # [d]
    entries: NDArray[np.float32] | None = None  # [nnz of the rows]
    recovered: NDArray[np.float32] | None = None  # [d]
    plain: NDArray[np.float32] | None = None  # [d + 1]


def committed_logprobs(
    logprobs: TargetLogprobs,
    rows: SparseRows,
    token_ids: IntArray,
    resolved: float | None = None,
) -> tuple[TokenLogprob, ...]:
    """Of a round's committed tokens: accepted drafts and one recovered or bonus token.

    Args:
        rows: the target's, of the same reply.
        token_ids: [accepted + 1].
        resolved: of the last token, where it was drawn by a ResolveCall.

    Raises InvalidRows when a value is missing.
    """
    last = len(token_ids) - 1
    values = [*logprobs.draft[:last].tolist(), _last(logprobs, rows, last, int(token_ids[last]), resolved)]
    return tuple(
        TokenLogprob(value, tuple(ids), tuple(top))
        for value, ids, top in zip(
            values, logprobs.top_token_ids[: last + 1].tolist(), logprobs.top[: last + 1].tolist(), strict=True
        )
    )


def _last(logprobs: TargetLogprobs, rows: SparseRows, position: int, token_id: int, resolved: float | None) -> float:
    if resolved is not None:
        return resolved
    if logprobs.entries is not None:
        start, stop = rows.row_splits[position], rows.row_splits[position + 1]
        at = start + int(np.searchsorted(rows.token_ids[start:stop], token_id))
        if at < stop and rows.token_ids[at] == token_id:
            return float(logprobs.entries[at])
    drawn = logprobs.plain if position == len(logprobs.draft) else logprobs.recovered
    if drawn is None:
        raise InvalidRows("the verifier sent no logprob of a token it drew")
    return float(drawn[position])
