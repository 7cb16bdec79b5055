"""Drafting ahead: while the verifier works on a round, the drafter drafts the next one, as if it went as hoped.

Hoped is that every token submitted is accepted and that the verifier's own token is the one that the drafter would have
drafted next. A draft is a pure function of its call (roles.Drafter; its numbers are keyed by seed and position), so a hope
that comes true gives, bit for bit, the block that would have been asked for afterwards, and one that does not is never looked at:
nothing about the answer depends on drafting ahead, only when it is there. What it may cost is the drafter's time.

Not for drafters whose blocks depend on more than the call says: the verifier's features of tokens that it has not read yet,
or what copying has been worth in the session so far (CombinedDrafter).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from specdiff_dist.core.rows import IntArray
from specdiff_dist.core.speculation import next_ask
from specdiff_dist.drafters.combined import CombinedDrafter, CopyingDrafter
from specdiff_dist.engine.session import NO_TOKENS, Session
from specdiff_dist.errors import InvalidRequest, SpecdiffError
from specdiff_dist.roles import Drafter
from specdiff_dist.types import DraftBlock, DraftCall, DrafterInfo


class DraftAhead:
    """One session's draft of the round to come. Its calls run in tasks; `close` ends them."""

    def __init__(self, session: Session, drafter: Drafter, info: DrafterInfo) -> None:
        """Raises InvalidRequest when the drafter cannot."""
        if info.feature_layers or isinstance(drafter, CombinedDrafter | CopyingDrafter):
            why = "the verifier's features" if info.feature_layers else "what copying has been worth so far"
            raise InvalidRequest(
                f"draft_ahead needs a drafter that drafts from the tokens alone, and drafter {info.name!r} goes by {why}; "
                "leave draft_ahead out",
                param="quality.draft_ahead",
            )
        self._session, self._drafter, self._info = session, drafter, info
        self._hoped: IntArray = NO_TOKENS  # what this round would commit
        self._start = 0  # where
        self._call: DraftCall | None = None
        self._task: asyncio.Task[DraftBlock] | None = None
        self._dropped: set[asyncio.Task[DraftBlock]] = set()
        self._is_hit: bool | None = None  # of this round; None: nothing was asked for ahead

    def ask(self, block: DraftBlock, guess: int | None) -> None:
        """Asks for the draft after `block`, about to be verified, and `guess`, the token after it (None: there is none, then
        this does nothing)."""
        session = self._session
        if guess is None:
            return
        self._hoped, self._start = np.append(block.token_ids, guess).astype(np.int32), session.num_committed
        room = session.room_for_draft(self._info, len(self._hoped))
        wanted = min(next_ask(session.config.policy, session.knowledge), room)
        if wanted < 1:
            return
        prefix = session.state_prefix(session.drafter_cached)
        prefix = replace(
            prefix, round_index=prefix.round_index + 1, new_token_ids=np.append(prefix.new_token_ids, self._hoped)
        )
        self._call = session.draft_call(prefix, min(wanted + 1, room))
        self._task = asyncio.create_task(self._drafter.draft(self._call))

    async def take(self, call: DraftCall) -> DraftBlock | None:
        """The reply to `call` if that is what was asked for ahead; None: it is to be asked now."""
        if self._task is None or not self._is_asked(call):
            return None
        task, self._task = self._task, None
        self._is_hit = False
        try:
            block = await task
        except SpecdiffError:  # it is asked again, and what it complains of is heard there
            return None
        self._is_hit = True
        return block

    def settle(self) -> bool | None:
        """To be called once the round has drafted: whether it took what had been asked for ahead (None: nothing had). Gives up
        what it did not take."""
        is_hit, self._is_hit = self._is_hit, None
        if self._task is None:
            return is_hit
        self._drop(self._task)
        self._task = None
        return False

    def _is_asked(self, call: DraftCall) -> bool:
        """Whether `call` differs from the one asked for in nothing but what it believes cached."""
        mine, session = self._call, self._session
        return (
            mine is not None
            and call.prefix.num_committed == mine.prefix.num_committed
            and call.num_draft_tokens == mine.num_draft_tokens
            and len(call.drafted_token_ids) == 0
            and bool(np.array_equal(session.tokens_from(self._start), self._hoped))
        )

    def _drop(self, task: asyncio.Task[DraftBlock]) -> None:
        """Its answer is not waited for: the next call says what is committed, and the replica crops to that."""
        task.cancel()
        self._dropped.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[DraftBlock]) -> None:
        self._dropped.discard(task)
        if not task.cancelled():
            task.exception()  # heard

    async def close(self) -> None:
        """Waits until no call is left."""
        if self._task is not None:
            self._drop(self._task)
            self._task = None
        if self._dropped:
            await asyncio.wait(set(self._dropped))
