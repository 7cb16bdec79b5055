"""Which prompts and answers are worth training on."""

from __future__ import annotations

import numpy as np

from specdiff_dist.core.rows import IntArray

MIN_PROMPT_TOKENS = 8
MAX_PROMPT_TOKENS = 200  # of prompts the verifier writes itself
MAX_PROMPT_REPETITION = 0.3
MIN_ANSWER_TOKENS = 16
MAX_ANSWER_REPETITION = 0.5


def repetition(token_ids: IntArray, order: int = 4) -> float:
    """Share of the n-grams that occurred before: 0 without repetition, near 1 in a loop."""
    if len(token_ids) < order:
        return 0.0
    grams = np.lib.stride_tricks.sliding_window_view(np.asarray(token_ids), order)
    return 1.0 - len(np.unique(grams, axis=0)) / len(grams)


def answer_fault(token_ids: IntArray) -> str | None:
    """Why an answer is left out: "short", "repetition", or None."""
    if len(token_ids) < MIN_ANSWER_TOKENS:
        return "short"
    return "repetition" if repetition(token_ids) > MAX_ANSWER_REPETITION else None


def prompt_fault(token_ids: IntArray, *, ended: bool) -> str | None:
    """Why a prompt that the verifier wrote (without the end of its turn) is left out: "length", "repetition", or None."""
    if not ended or not MIN_PROMPT_TOKENS <= len(token_ids) <= MAX_PROMPT_TOKENS:
        return "length"
    return "repetition" if repetition(token_ids, 3) > MAX_PROMPT_REPETITION else None
