"""The drafting half of a round: the speculation policy asks, the drafter answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import numpy as np

from specdiff_dist.core.rows import entries_of
from specdiff_dist.core.speculation import Knowledge, Off, Policy, asks_copying, asks_drafter, plan
from specdiff_dist.drafters.combined import CombinedDrafter, CopyingDrafter
from specdiff_dist.engine.ahead import DraftAhead
from specdiff_dist.engine.session import Session
from specdiff_dist.errors import DrafterUnavailable, InvalidRows, PrefixMismatch, SpecdiffError
from specdiff_dist.roles import Drafter
from specdiff_dist.session_prefix import MAX_RESENDS
from specdiff_dist.types import DraftBlock, DraftCall, DrafterInfo


@dataclass(frozen=True, slots=True)
class Drafted:
    """What was drafted in a round, how much of it to submit, and whether drafting was wanted but failed."""

    block: DraftBlock
    length: int
    failed: bool
    num_calls: int = 0
    next_token_id: int | None = None  # that the drafter would have drafted after `block`, where it was asked to say

    @property
    def guess(self) -> int | None:
        """The drafter's own token after those submitted."""
        return int(self.block.token_ids[self.length]) if self.length < self.block.num_tokens else self.next_token_id


def told_drafter(drafter: Drafter | None, policy: Policy, knowledge: Knowledge) -> Drafter | None:
    """Whom a session that begins now knows of: the drafter, its part that copies, or nobody."""
    if knowledge.tells_drafter(policy):
        return drafter
    if isinstance(drafter, CombinedDrafter) and knowledge.tells_copying(policy):
        return drafter.copying()
    return None


async def draft_round(
    session: Session, drafter: Drafter | None, info: DrafterInfo | None, ahead: DraftAhead | None = None
) -> Drafted:
    """Drafts as the policy asks, in as many calls as it wants. Nothing can fail here: without a drafter the block stays
    as long as it is, if need be empty, and the round is decoded plainly.

    With `ahead`, every call asks for a token more than the policy wants, who does not get to see it: the guess to go on from.
    """
    room = session.room_for_draft(info)
    if drafter is None or room <= 0 or isinstance(session.config.policy, Off):
        return Drafted(DraftBlock.empty(), 0, False)
    if info is None:  # what it drafts could not be trusted: the exact tier's promise depends on what a drafter is
        session.degraded = True
        return Drafted(DraftBlock.empty(), 0, True)
    if session.num_featured < session.num_committed - 1:  # the first round: the verifier has not read the prompt yet
        return Drafted(DraftBlock.empty(), 0, False)
    ask = _whom_to_ask(session, drafter)
    if ask is None:
        return Drafted(DraftBlock.empty(), 0, False)
    block, failed, num_calls, next_token_id = DraftBlock.empty(), False, 0, None
    steps = plan(session.config.policy, session.knowledge)
    try:
        wanted = next(steps)
        while True:
            wanted = min(wanted, room - block.num_tokens)
            if wanted > 0 and not failed:
                try:
                    num_asked = wanted if ahead is None else min(wanted + 1, room - block.num_tokens)
                    more = await _draft(session, ask, block, num_asked, ahead)
                    next_token_id = int(more.token_ids[wanted]) if more.num_tokens > wanted else None
                    more = more.head(min(more.num_tokens, wanted))
                    block = block.followed_by(more) if block.num_tokens else more
                    num_calls += 1
                except SpecdiffError:  # a drafter never fails a request, whatever it complains of
                    session.degraded = failed = True
            wanted = steps.send(block.statistics)
    except StopIteration as decided:
        return Drafted(block, min(decided.value, block.num_tokens), failed, num_calls, next_token_id)


Ask = Callable[[DraftCall], Awaitable[DraftBlock]]


def _whom_to_ask(session: Session, drafter: Drafter) -> Ask | None:
    """Decided once for the round, before anything is drafted: the drafter, its part that copies, or nobody."""
    policy, knowledge = session.config.policy, session.knowledge
    if not isinstance(drafter, CopyingDrafter) and asks_drafter(policy, knowledge):
        return drafter.draft
    if isinstance(drafter, CombinedDrafter | CopyingDrafter) and asks_copying(policy, knowledge):
        return drafter.copy
    return None


async def _draft(session: Session, ask: Ask, block: DraftBlock, wanted: int, ahead: DraftAhead | None) -> DraftBlock:
    """Up to `wanted` tokens after those of `block`. A replica that has less of the session gets the rest resent."""
    num_lost = 0
    while num_lost < MAX_RESENDS:
        # What features of so many tokens do not fit into is stated in pieces, each with a token drafted for nothing.
        end = min(session.drafter_cached + session.max_new_tokens + 1, session.num_committed)
        is_whole = end == session.num_committed
        prefix = session.state_prefix(session.drafter_cached, end)
        call = session.draft_call(
            prefix, wanted if is_whole else 1, block.token_ids if is_whole else block.token_ids[:0]
        )
        try:
            with session.waiting():
                more = None if ahead is None else await ahead.take(call)
                more = more or await ask(call)
        except PrefixMismatch as less:
            session.drafter_cached = max(min(less.cached_len, call.prefix.prefix_len - 1), 0)
            num_lost += 1
            continue
        session.drafter_cached = max(min(more.cached_len, session.num_committed), 0)
        if not is_whole:
            num_lost += session.drafter_cached <= prefix.prefix_len  # a replica that keeps nothing gets nowhere
            continue
        return _checked(more, session.vocab_size).head(min(more.num_tokens, wanted))
    raise DrafterUnavailable("the drafter keeps losing the session's cache")


def _checked(block: DraftBlock, vocab_size: int) -> DraftBlock:
    """A drafter's reply is judged before anything is built on it: a bad one costs its round, not the request."""
    block.proposals.check(vocab_size=vocab_size, what="proposal")
    if not block.num_tokens == block.proposals.num_rows == len(block.confidences) == len(block.max_probs):
        raise InvalidRows(f"{block.num_tokens} draft tokens came with {block.proposals.num_rows} proposals")
    if entries_of(block.proposals, block.token_ids) is None:
        raise InvalidRows("a draft token has probability 0 in its own proposal")
    if not (np.isfinite(block.confidences).all() and np.isfinite(block.max_probs).all()):
        raise InvalidRows("a draft token's confidence is NaN or infinite")  # it would poison what policies learn
    proposals = block.proposals.without_zeros()  # rules divide by the proposal
    return block if proposals is block.proposals else replace(block, proposals=proposals)
