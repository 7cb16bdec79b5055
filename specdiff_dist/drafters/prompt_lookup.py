"""Drafts by copying: what followed the last tokens when they occurred before in the same text. No weights."""

from __future__ import annotations

import time

import numpy as np

from specdiff_dist.config import REVEAL_ORDERS
from specdiff_dist.core.rows import IntArray, SparseRows
from specdiff_dist.errors import InvalidConfig
from specdiff_dist.session_prefix import SessionTable, check_anchor
from specdiff_dist.types import CallCost, DraftBlock, DraftCall, DrafterInfo


class PromptLookupDrafter:
    """A DrafterEngine: finds the longest n-gram (max_ngram … min_ngram tokens) that ends the committed text and occurs
    in it before, takes the most recent occurrence and proposes what followed, one-hot. Empty block without a match.

    Where the copy reaches the end of the text it goes on with what it has copied, so a text that repeats itself with any
    period gives whole blocks.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        max_ngram: int = 3,
        min_ngram: int = 1,
        max_sessions: int = 64,
    ) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise InvalidConfig(f"n-gram sizes must satisfy 1 ≤ min ≤ max, not {min_ngram} and {max_ngram}")
        self._info = DrafterInfo(
            name="prompt-lookup", vocab_size=vocab_size, max_model_len=max_model_len, max_draft_tokens=256,
            reveal_orders=REVEAL_ORDERS, is_deterministic=True, reports_true_proposals=True,
        )  # fmt: skip
        self._ngrams = range(max_ngram, min_ngram - 1, -1)
        self._sessions: SessionTable[None] = SessionTable(lambda: None, max_sessions=max_sessions)

    @property
    def info(self) -> DrafterInfo:
        return self._info

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def draft(self, call: DraftCall) -> DraftBlock:
        """See roles.Drafter; `effort`, `sampling` and `seed` change nothing."""
        started = time.perf_counter()
        check_anchor(call.prefix)
        session = self._sessions.get(call.prefix.session_id)
        session.agree(call.prefix)
        session.extend(call.prefix.new_token_ids[:-1])  # the anchor comes again in the next call, as for other drafters
        text = np.concatenate([session.token_ids, call.prefix.new_token_ids[-1:], call.drafted_token_ids])
        tokens = look_up(text, min(call.num_draft_tokens, self._info.max_draft_tokens), self._ngrams)
        ones = np.ones(len(tokens), np.float32)
        cost = CallCost(forward_s=time.perf_counter() - started)
        return DraftBlock(tokens, SparseRows.one_hot(tokens), ones, ones, session.cached_len, cost)

    def release(self, session_id: str) -> None:
        self._sessions.drop(session_id)


def look_up(token_ids: IntArray, num_tokens: int, ngrams: range = range(3, 0, -1)) -> IntArray:
    """The `num_tokens` tokens that followed the most recent earlier occurrence of the longest n-gram ending
    `token_ids` [t]; none (shape [0]) when no n-gram size occurs twice."""
    length = len(token_ids)
    for size in ngrams:
        if size >= length or num_tokens < 1:
            continue
        num_starts = length - size  # the last start that still has a continuation is length - size - 1
        is_match = token_ids[:num_starts] == token_ids[-size]
        for offset in range(1, size):
            is_match &= token_ids[offset : offset + num_starts] == token_ids[offset - size]
        starts = np.flatnonzero(is_match)
        if len(starts):
            return np.resize(token_ids[starts[-1] + size :], num_tokens).astype(np.int32)
    return np.zeros(0, np.int32)
