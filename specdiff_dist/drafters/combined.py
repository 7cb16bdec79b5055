"""Two drafters behind one: copying where the text repeats itself, diffusion elsewhere, nothing where neither would pay,
chosen anew in every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdiff_dist.batching import BatchingDrafter, Steps, run_alone
from specdiff_dist.core.calibration import read_table
from specdiff_dist.core.rows import IntArray, SparseRows
from specdiff_dist.drafters.draft_choice import (
    DIFFUSION,
    DIFFUSION_RATES,
    DRAFT_COST,
    NOTHING,
    TOKEN_COST,
    DraftChoice,
    copied,
    find_match,
)
from specdiff_dist.errors import InvalidRequest, PrefixMismatch
from specdiff_dist.roles import DrafterEngine
from specdiff_dist.session_prefix import SessionTable, check_anchor
from specdiff_dist.types import DraftBlock, DraftCall, DrafterInfo, PrefixStatement, prefix_crc

SUFFIX = "+prompt-lookup"
MAX_COPIED = 16  # tokens of a round that copies, where the inner drafter's blocks are shorter


class CombinedDrafter:
    """A DrafterEngine around another one. Rounds that copy report one-hot proposals, other rounds the inner drafter's own.
    So that a policy can weigh both with one measure, every `max_prob` is an acceptance probability: what was learned for the
    match length, or what the inner drafter's calibration makes of its own.

    Exactness. A round is lossless whatever is known before it begins: given any history H, its tokens are drawn from the
    proposals reported, with numbers of its own, and accepted so that each has the target's law given the committed tokens
    before it, for every way in which H may have chosen the proposals. H is here the committed tokens and the blocks that
    this session's past rounds drafted, both over before the round draws its first number; the choice is a function of H
    and of how many tokens are asked for, it stands for the whole round (a later call of the round, which brings sampled
    tokens, does not reopen it), and it looks at no other session, whose equal seed would make it know this round's
    numbers. Choosing by the drafted block itself, say diffusion only where its sampled tokens look probable, would be
    trap 2; tests/law enumerates both.
    """

    def __init__(
        self,
        inner: DrafterEngine,
        *,
        name: str | None = None,
        max_sessions: int = 64,
        expected_acceptance: Sequence[float] = DIFFUSION_RATES,
        draft_cost: float = DRAFT_COST,
        token_cost: float = TOKEN_COST,
    ) -> None:
        """`expected_acceptance`: of the inner drafter by position, given reached, until a session has its own;
        `draft_cost`, `token_cost`: of one of its blocks and of a drafted token, over a verification of one token."""
        self._inner = inner
        self.kv_bytes_per_token = getattr(inner, "kv_bytes_per_token", 0)
        self.device_type = getattr(inner, "device_type", "cpu")
        info = inner.info
        self._num_inner = info.max_draft_tokens
        self._info = replace(
            info, name=name or info.name + SUFFIX, calibration=(),
            max_draft_tokens=max(info.max_draft_tokens, MAX_COPIED),
        )  # fmt: skip
        self._calibration = np.asarray(info.calibration, np.float64)
        self._sessions: SessionTable[DraftChoice] = SessionTable(
            lambda: DraftChoice(expected_acceptance, draft_cost, token_cost, info.feature_size),
            max_sessions=max_sessions,
        )

    @property
    def info(self) -> DrafterInfo:
        return self._info

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def draft(self, call: DraftCall) -> DraftBlock:
        """See roles.Drafter."""
        return run_alone(self.drafting(call), self.forward_parts)

    def forward_parts(self, parts: Sequence[Any]) -> Sequence[Any]:
        """The inner drafter's forward."""
        assert isinstance(self._inner, BatchingDrafter), "only a batching drafter asks for forwards"
        return self._inner.forward_parts(parts)

    def drafting(self, call: DraftCall) -> Steps[Any, Any, DraftBlock]:
        """`draft` as a coroutine that yields the forwards it needs."""
        check_anchor(call.prefix)
        session = self._sessions.get(call.prefix.session_id)
        session.agree(call.prefix)
        committed = np.concatenate([session.token_ids, call.prefix.new_token_ids])
        choice = session.cache
        if self._info.feature_layers:
            if call.features is None or len(call.features) != len(call.prefix.new_token_ids) - 1:
                raise InvalidRequest("a call brings the features of its new tokens but the anchor", param="features")
            choice.features.crop(call.prefix.prefix_len)
            choice.features.extend(call.features)
        session.extend(call.prefix.new_token_ids[:-1])  # the anchor comes again in the next call
        choice.learn(committed)
        num_before = len(call.drafted_token_ids)
        num_tokens = min(call.num_draft_tokens, self._info.max_draft_tokens - num_before)
        chosen = NOTHING if num_tokens < 1 else choice.of_round(committed, num_tokens)
        if chosen == DIFFUSION:
            num_tokens = min(num_tokens, self._num_inner - num_before)
        if chosen == NOTHING or num_tokens < 1:
            return DraftBlock.empty(session.cached_len)
        if chosen == DIFFUSION:
            block = yield from self._inner_block(replace(call, num_draft_tokens=num_tokens), committed, choice)
            choice.drafted(committed, call.drafted_token_ids, block.token_ids)
            return replace(block, cached_len=session.cached_len, max_probs=self._calibrated(call, block))
        text = np.concatenate([committed, call.drafted_token_ids])
        match = find_match(text)
        tokens = copied(text, match, num_tokens)
        confidences = choice.lookup_rates(match, num_tokens).astype(np.float32)
        return DraftBlock(tokens, SparseRows.one_hot(tokens), confidences, confidences, session.cached_len)

    def release(self, session_id: str) -> None:
        self._sessions.drop(session_id)
        self._inner.release(session_id)

    def _calibrated(self, call: DraftCall, block: DraftBlock) -> NDArray[np.float32]:
        """A function of the inner drafter's max_probs alone: never of what was sampled."""
        if not len(self._calibration):
            return block.max_probs
        first = min(len(call.drafted_token_ids), len(self._calibration) - 1)
        return read_table(block.max_probs.astype(np.float64), self._calibration[first:]).astype(np.float32)

    def _inner_block(self, call: DraftCall, committed: IntArray, choice: DraftChoice) -> Steps[Any, Any, DraftBlock]:
        """The inner drafter has not seen the rounds that copied: its prefix is stated anew, from what it has cached."""
        while True:
            cached = min(choice.diffusion_cached, len(committed) - 1)
            prefix = PrefixStatement(
                call.prefix.session_id, call.prefix.round_index, cached, prefix_crc(committed[:cached]), committed[cached:]
            )  # fmt: skip
            features = choice.features.of(cached, len(committed) - 1) if self._info.feature_layers else None
            try:
                block = yield from self._inner_drafting(replace(call, prefix=prefix, features=features))
            except PrefixMismatch as less:
                if cached == 0:
                    raise
                choice.diffusion_cached = max(min(less.cached_len, cached - 1), 0)
            else:
                choice.diffusion_cached = block.cached_len
                return block

    def _inner_drafting(self, call: DraftCall) -> Steps[Any, Any, DraftBlock]:
        if isinstance(self._inner, BatchingDrafter):
            return (yield from self._inner.drafting(call))
        return self._inner.draft(call)
