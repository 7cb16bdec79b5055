"""The round loop: draft → choose length → verify → accept → commit.

It runs unchanged in the router, in-process, in tests and in benchmarks; who the roles are is the caller's business.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from time import perf_counter

import numpy as np

from specdiff_dist.config import DecodeConfig
from specdiff_dist.core.acceptance import accept
from specdiff_dist.core.randomness import Purpose, uniforms
from specdiff_dist.core.rows import lookup, token_keys
from specdiff_dist.core.speculation import choose_length, num_to_draft
from specdiff_dist.engine.session import Session
from specdiff_dist.engine.stopping import Detokenizer
from specdiff_dist.errors import DrafterUnavailable, InvalidRows, PrefixMismatch, VerifierUnavailable
from specdiff_dist.roles import Drafter, Verifier
from specdiff_dist.types import (
    DraftBlock,
    DraftCall,
    DrafterInfo,
    GenerateRequest,
    RoundRecord,
    TargetRows,
    TokenChunk,
    VerifyCall,
)  # fmt: skip

MAX_RESENDS = 8  # a replica may be replaced, or evict the session, several times within one call


async def decode(
    request: GenerateRequest,
    config: DecodeConfig,
    drafter: Drafter | None,
    verifier: Verifier,
    *,
    tier: str,
    detokenizer: Detokenizer | None = None,
) -> AsyncGenerator[TokenChunk, None]:
    """Yields one chunk per round; the last has `finish_reason` and `receipt`. Releases both sessions however it ends.

    `tier` is only reported. `detokenizer` None: chunks carry token ids and no text (stop strings need one).
    Raises InvalidRequest before the first chunk; VerifierUnavailable and InvalidRows at any time. A failing drafter
    never fails the request: its rounds are decoded plainly and the receipt says `degraded`.
    """
    drafter_info = await _info(drafter)
    session = Session(request, config, tier, await verifier.info(), drafter_info, detokenizer)
    try:
        while session.finish_reason is None:
            started = perf_counter()
            position = session.num_committed  # of the first token this round decides

            block, failed = await _draft(session, drafter, drafter_info)
            drafted = perf_counter()
            num_drafted, draft_cost = block.num_tokens, block.cost
            block = block.head(choose_length(config.policy, block.confidences, block.max_probs))
            chosen_s = perf_counter() - drafted

            target_uniforms = uniforms(request.seed, Purpose.TARGET, position, block.num_tokens + 1)
            target = await _verify(session, verifier, block, target_uniforms)
            verified = perf_counter()

            accept_uniforms = uniforms(request.seed, Purpose.ACCEPT, position, block.num_tokens)
            outcome = accept(config.rule, block.token_ids, block.proposals, target, accept_uniforms, target_uniforms)
            token_ids, text = session.commit(outcome, block.num_tokens)

            ended = perf_counter()
            record = RoundRecord(
                num_drafted, block.num_tokens, outcome.num_accepted, draft_cost, target.cost,
                decide_s=chosen_s + ended - verified, wall_s=ended - started, degraded=failed,
            )  # fmt: skip
            finish_reason = session.finish_reason
            receipt = session.receipt() if finish_reason else None
            yield TokenChunk(token_ids, text, finish_reason, receipt, (record,))
    finally:
        await verifier.release(request.request_id)
        if drafter is not None:
            await drafter.release(request.request_id)


async def _info(drafter: Drafter | None) -> DrafterInfo | None:
    if drafter is None:
        return None
    try:
        return await drafter.info()
    except DrafterUnavailable:
        return None


async def _draft(session: Session, drafter: Drafter | None, info: DrafterInfo | None) -> tuple[DraftBlock, bool]:
    """The round's draft block (empty: decode plainly) and whether drafting was wanted but failed."""
    wanted = min(num_to_draft(session.config.policy), session.num_tokens_left - 1)  # one token is the verifier's own
    if info is not None:
        wanted = min(wanted, info.max_draft_tokens, info.max_model_len - session.num_committed)
    if drafter is None or wanted <= 0:
        return DraftBlock.empty(), False
    try:
        for _ in range(MAX_RESENDS):
            call = DraftCall(
                session.state_prefix(session.drafter_cached), wanted, session.config.effort, session.draft_sampling,
                session.config.draft_top_k, session.request.seed,
            )  # fmt: skip
            try:
                block = await drafter.draft(call)
            except PrefixMismatch as less:
                session.drafter_cached = min(less.cached_len, max(call.prefix.prefix_len - 1, 0))
                continue
            session.drafter_cached = min(block.cached_len, session.num_committed)
            return _checked(block, session.vocab_size).head(min(block.num_tokens, wanted)), False
        raise DrafterUnavailable("the drafter keeps losing the session's cache")
    except (DrafterUnavailable, InvalidRows):
        session.degraded = True
        return DraftBlock.empty(), True


def _checked(block: DraftBlock, vocab_size: int) -> DraftBlock:
    """A drafter's reply is judged before anything is built on it: a bad one costs its round, not the request."""
    block.proposals.check(vocab_size=vocab_size, what="proposal")
    if not block.num_tokens == block.proposals.num_rows == len(block.confidences) == len(block.max_probs):
        raise InvalidRows(f"{block.num_tokens} draft tokens came with {block.proposals.num_rows} proposals")
    if np.any(lookup(block.proposals, block.proposals.normalised(), token_keys(block.token_ids)) <= 0.0):
        raise InvalidRows("a draft token has probability 0 in its own proposal")
    return block


async def _verify(session: Session, verifier: Verifier, block: DraftBlock, target_uniforms: np.ndarray) -> TargetRows:
    """Target rows for the block. A replica that has less of the session than believed gets the rest resent."""
    sampling = session.request.sampling
    proposals = block.proposals if sampling.may_be_wide else None
    for _ in range(MAX_RESENDS):
        prefix = session.state_prefix(session.verifier_cached)
        try:
            target = await verifier.verify(VerifyCall(prefix, block.token_ids, sampling, proposals, target_uniforms))
        except PrefixMismatch as less:
            session.verifier_cached = min(less.cached_len, max(prefix.prefix_len - 1, 0))
            session.verifier_rebuilds += session.round_index > 0
            continue
        if not target.is_wide:
            target.rows.check(vocab_size=session.vocab_size, what="target row")
        return target
    raise VerifierUnavailable("the verifier keeps losing the session's cache; is its session capacity too small?")
