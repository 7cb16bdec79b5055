"""Two drafters behind one: copying where the text repeats itself, diffusion elsewhere, nothing where neither would pay,
chosen anew in every round."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from specdiff_dist.config import REVEAL_ORDERS
from specdiff_dist.core.calibration import read_table
from specdiff_dist.core.features import max_rows
from specdiff_dist.core.rows import FloatArray, IntArray, SparseRows
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
from specdiff_dist.errors import DrafterUnavailable, InvalidRequest, PrefixMismatch
from specdiff_dist.roles import Drafter
from specdiff_dist.session_prefix import MAX_RESENDS, SessionTable, check_anchor
from specdiff_dist.types import CallCost, DraftBlock, DraftCall, DrafterInfo, PrefixStatement, prefix_crc

SUFFIX = "+prompt-lookup"
MAX_COPIED = 16  # tokens of a round that copies, where the inner drafter's blocks are shorter

Answering = Generator[DraftCall, DraftBlock, DraftBlock]
"""A call that is being answered: yields what the inner drafter is to be asked, is sent its reply, returns the block."""


def combined_info(inner: DrafterInfo) -> DrafterInfo:
    """What CombinedDrafter says of itself around `inner`."""
    return replace(
        inner, name=inner.name + SUFFIX, calibration=(), max_draft_tokens=max(inner.max_draft_tokens, MAX_COPIED)
    )


class CombinedDrafter:
    """A Drafter around another one, in the caller's own process: it sees the committed text there, so that a round that copies
    asks nobody, and the inner drafter is told of the text only when it is asked. Rounds that copy report one-hot proposals,
    other rounds the inner drafter's own. So that a policy can weigh both with one measure, every `max_prob` is an
    acceptance probability: what was learned for the match length, or what the inner drafter's calibration makes of its own.

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
        inner: Drafter,
        *,
        max_sessions: int = 64,
        expected_acceptance: Sequence[float] = DIFFUSION_RATES,
        draft_cost: float = DRAFT_COST,
        token_cost: float = TOKEN_COST,
    ) -> None:
        """`expected_acceptance`: of the inner drafter by position, given reached, until a session has its own;
        `draft_cost`, `token_cost`: of one of its blocks and of a drafted token, over a verification of one token."""
        self._inner = inner
        self._options = expected_acceptance, draft_cost, token_cost
        self._inner_info: DrafterInfo | None = None  # once it was asked for
        self._calibration: FloatArray = np.zeros((0, 0))  # its
        self._sessions: SessionTable[DraftChoice] = SessionTable(self._new_choice, max_sessions=max_sessions)

    async def info(self) -> DrafterInfo:
        """Raises DrafterUnavailable."""
        return combined_info(await self._asked_info())

    def copying(self) -> CopyingDrafter:
        """The part that asks nobody, for sessions that are to do without the other."""
        return CopyingDrafter(self)

    async def draft(self, call: DraftCall) -> DraftBlock:
        """See roles.Drafter."""
        info = await self._asked_info()
        started, asking = perf_counter(), self._answering(call, info)
        try:
            inner_call = next(asking)
            while True:
                try:
                    block = await self._inner.draft(inner_call)
                except PrefixMismatch as less:
                    inner_call = asking.throw(less)
                else:
                    inner_call = asking.send(block)
        except StopIteration as answered:
            return _timed(answered.value, started)

    async def copy(self, call: DraftCall) -> DraftBlock:
        """`draft` for a round that is to ask nobody: copies, or drafts nothing."""
        started = perf_counter()
        try:
            next(self._answering(call, self._inner_info, copies_only=True))
        except StopIteration as answered:
            return _timed(answered.value, started)
        raise AssertionError("copying asks nobody")

    async def release(self, session_id: str) -> None:
        self._sessions.drop(session_id)
        await self._inner.release(session_id)

    async def _asked_info(self) -> DrafterInfo:
        if self._inner_info is None:
            self._inner_info = await self._inner.info()
            self._calibration = np.asarray(self._inner_info.calibration, np.float64)
        return self._inner_info

    def _new_choice(self) -> DraftChoice:
        size = 0 if self._inner_info is None else self._inner_info.feature_size
        return DraftChoice(*self._options, size)

    def _answering(self, call: DraftCall, info: DrafterInfo | None, *, copies_only: bool = False) -> Answering:
        check_anchor(call.prefix)
        session = self._sessions.get(call.prefix.session_id)
        session.agree(call.prefix)
        committed = np.concatenate([session.token_ids, call.prefix.new_token_ids])
        choice = session.cache
        has_features = info is not None and bool(info.feature_layers)
        if has_features and not (copies_only and call.features is None):
            if call.features is None or len(call.features) != len(call.prefix.new_token_ids) - 1:
                raise InvalidRequest("a call brings the features of its new tokens but the anchor", param="features")
            choice.features.crop(call.prefix.prefix_len)
            choice.features.extend(call.features)
        session.extend(call.prefix.new_token_ids[:-1])  # the anchor comes again in the next call
        choice.learn(committed)
        num_before = len(call.drafted_token_ids)
        num_inner = 0 if info is None else info.max_draft_tokens
        num_tokens = min(call.num_draft_tokens, max(num_inner, MAX_COPIED) - num_before)
        chosen = NOTHING if num_tokens < 1 else choice.of_round(committed, num_tokens, copies_only=copies_only)
        if chosen == DIFFUSION:
            num_tokens = min(num_tokens, num_inner - num_before)
        if chosen == NOTHING or num_tokens < 1:
            return replace(DraftBlock.empty(session.cached_len), is_local=True)
        if chosen == DIFFUSION:
            assert info is not None, "without an inner drafter only copies are made"
            block = yield from _asking_inner(
                replace(call, num_draft_tokens=num_tokens), committed, choice, has_features
            )
            choice.drafted(committed, call.drafted_token_ids, block.token_ids)
            return replace(block, cached_len=session.cached_len, max_probs=_calibrated(call, block, self._calibration))
        text = np.concatenate([committed, call.drafted_token_ids])
        match = find_match(text)
        tokens = copied(text, match, num_tokens)
        confidences = choice.lookup_rates(match, num_tokens).astype(np.float32)
        return DraftBlock(
            tokens, SparseRows.one_hot(tokens), confidences, confidences, session.cached_len, is_local=True
        )


class CopyingDrafter:
    """A Drafter that only copies: CombinedDrafter for a session that is to do without the inner drafter. It needs no features,
    no lease and no wire."""

    def __init__(self, combined: CombinedDrafter) -> None:
        self._combined = combined

    async def info(self) -> DrafterInfo:
        """Raises DrafterUnavailable."""
        info = await self._combined.info()
        return replace(
            info, reveal_orders=REVEAL_ORDERS, is_deterministic=True, reports_true_proposals=True, feature_layers=(),
            feature_size=0,
        )  # fmt: skip

    async def draft(self, call: DraftCall) -> DraftBlock:
        """See roles.Drafter."""
        return await self.copy(call)

    async def copy(self, call: DraftCall) -> DraftBlock:
        """See CombinedDrafter."""
        return await self._combined.copy(call)

    async def release(self, session_id: str) -> None:
        await self._combined.release(session_id)


def _calibrated(call: DraftCall, block: DraftBlock, calibration: FloatArray) -> NDArray[np.float32]:
    """A function of the inner drafter's max_probs alone: never of what was sampled."""
    if not len(calibration):
        return block.max_probs
    first = min(len(call.drafted_token_ids), len(calibration) - 1)
    return read_table(block.max_probs.astype(np.float64), calibration[first:]).astype(np.float32)


def _timed(block: DraftBlock, started: float) -> DraftBlock:
    """A call that was asked of the inner drafter brings its times; copying takes the caller's own."""
    if not block.is_local:
        return block
    return replace(block, cost=CallCost(wall_s=perf_counter() - started))


def _asking_inner(call: DraftCall, committed: IntArray, choice: DraftChoice, has_features: bool) -> Answering:
    """The inner drafter has not seen the rounds that copied: its prefix is stated anew, from what it has cached. What features
    of so many tokens do not fit into goes in pieces, each with a token drafted for nothing."""
    num_rows = max_rows(choice.features.size) if has_features else len(committed)
    num_lost = 0
    while num_lost < MAX_RESENDS:
        cached = min(choice.diffusion_cached, len(committed) - 1)
        end = min(cached + num_rows + 1, len(committed))
        prefix = PrefixStatement(
            call.prefix.session_id,
            call.prefix.round_index,
            cached,
            prefix_crc(committed[:cached]),
            committed[cached:end],
        )
        features = choice.features.of(cached, end - 1) if has_features else None
        piece = replace(call, prefix=prefix, features=features)
        if end < len(committed):
            piece = replace(piece, num_draft_tokens=1, drafted_token_ids=call.drafted_token_ids[:0])
        try:
            block = yield piece
        except PrefixMismatch as less:
            choice.diffusion_cached = max(min(less.cached_len, cached - 1), 0)
            num_lost += 1
        else:
            choice.diffusion_cached = max(min(block.cached_len, len(committed)), 0)
            if end == len(committed):
                return block
            num_lost += choice.diffusion_cached <= cached  # a replica that keeps nothing gets nowhere
    raise DrafterUnavailable("the drafter keeps losing the session's cache")
