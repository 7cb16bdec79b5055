"""What a verify call may ask about logits, and what logprobs in a reply must satisfy (checks.py has the rest)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdiff_dist.core.logprobs import MAX_LOGPROBS
from specdiff_dist.errors import InvalidRequest, InvalidRows
from specdiff_dist.types import TargetRows, VerifierInfo, VerifyCall

_ROUNDING = 1e-3  # of a log-sum-exp over 150k float32 numbers


def check_logits_asked(call: VerifyCall, info: VerifierInfo) -> None:
    """Raises InvalidRequest."""
    if call.num_logprobs is not None and not 0 <= call.num_logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(f"num_logprobs must be 0 … {MAX_LOGPROBS}, not {call.num_logprobs}")
    if call.processing is None:
        return
    call.processing.check_ids(info.vocab_size, call.ending_token_ids)
    if not 0 <= call.num_prompt_tokens <= call.prefix.num_committed:
        raise InvalidRequest(f"num_prompt_tokens must be within the {call.prefix.num_committed} committed tokens")
    ending = call.ending_token_ids
    if ending and not (min(ending) >= 0 and max(ending) < info.vocab_size):
        raise InvalidRequest(f"ending_token_ids must be in [0, {info.vocab_size})")


def check_logprobs(target: TargetRows, call: VerifyCall, info: VerifierInfo) -> None:
    """Raises InvalidRows."""
    logprobs = target.logprobs
    if call.num_logprobs is None or logprobs is None:
        if call.num_logprobs is not None or logprobs is not None:
            raise InvalidRows("logprobs came that were not asked for, or the other way round")
        return
    num_draft, num_top = len(call.draft_token_ids), min(call.num_logprobs, info.vocab_size)
    ids = logprobs.top_token_ids
    if ids.dtype != np.int32 or ids.shape != (num_draft + 1, num_top):
        raise InvalidRows(f"top logprobs must be of [{num_draft + 1}, {num_top}] tokens, not {list(ids.shape)}")
    if ids.size and (ids.min() < 0 or ids.max() >= info.vocab_size):
        raise InvalidRows(f"top logprobs must be of token ids in [0, {info.vocab_size})")
    _check(logprobs.top, (num_draft + 1, num_top), "top")
    _check(logprobs.draft, (num_draft,), "draft")
    if target.is_wide:
        _check(logprobs.recovered, (num_draft,), "recovered")
        _check(logprobs.plain, (num_draft + 1,), "plain")
    else:
        _check(logprobs.entries, target.rows.probs.shape, "entries")


def is_logprob(values: float | NDArray[np.floating]) -> bool:
    """Whether all are at most 0, up to rounding; -inf is, NaN is not."""
    return bool(np.all(np.asarray(values) <= _ROUNDING))


def _check(values: NDArray[np.float32] | None, shape: tuple[int, ...], what: str) -> None:
    if values is None or values.dtype != np.float32 or values.shape != shape:
        given = "none" if values is None else f"{values.dtype} {list(values.shape)}"
        raise InvalidRows(f"{what} logprobs must be float32 {list(shape)}, not {given}")
    if not is_logprob(values):
        raise InvalidRows(f"{what} logprobs: NaN or above 0")
