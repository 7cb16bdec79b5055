"""The replica's side of "the request states the prefix" (README, The wire)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from specdiff_dist.core.rows import IntArray
from specdiff_dist.errors import InvalidRequest, PrefixMismatch, StaleRound
from specdiff_dist.types import PrefixStatement, prefix_crc

CacheT = TypeVar("CacheT")
MAX_RESENDS = 8  # a replica may be replaced, or evict the session, several times within one call


def check_anchor(prefix: PrefixStatement) -> None:
    """Raises InvalidRequest: the token that a draft or a verification follows is always restated."""
    if len(prefix.new_token_ids) == 0:
        raise InvalidRequest("a call states at least one new token, the anchor", param="new_token_ids")


@dataclass(slots=True)
class SessionPrefix(Generic[CacheT]):
    """One session on a replica: the tokens whose state `cache` holds, in order."""

    cache: CacheT
    token_ids: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    round_index: int = -1
    held: object = None  # what the engine keeps until the session's next call

    @property
    def cached_len(self) -> int:
        return len(self.token_ids)

    def agree(self, prefix: PrefixStatement) -> int:
        """Length to crop the cache to. Leaves `token_ids` as the stated prefix.

        Raises PrefixMismatch when less is cached, or something else (then from 0); StaleRound for older rounds.
        """
        if prefix.round_index < self.round_index:
            raise StaleRound(f"round {prefix.round_index} arrived after round {self.round_index}")
        if self.cached_len < prefix.prefix_len:
            raise PrefixMismatch(self.cached_len)
        if prefix_crc(self.token_ids[: prefix.prefix_len]) != prefix.prefix_crc:
            raise PrefixMismatch(0)
        self.round_index = prefix.round_index
        self.token_ids = self.token_ids[: prefix.prefix_len]
        return prefix.prefix_len

    def extend(self, token_ids: IntArray) -> None:
        """Records tokens whose state has just been added to the cache."""
        self.token_ids = np.concatenate([self.token_ids, token_ids]).astype(np.int32)


class SessionTable(Generic[CacheT]):
    """All sessions of a replica. Over `max_sessions` the least recently used is dropped: its caller gets PrefixMismatch
    and resends, so dropping costs time and never tokens."""

    def __init__(
        self,
        new_cache: Callable[[], CacheT],
        *,
        max_sessions: int,
        on_drop: Callable[[str], None] = lambda session_id: None,
    ) -> None:
        """`on_drop`: told of every session that goes, however it does."""
        self._new_cache, self._on_drop = new_cache, on_drop
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, SessionPrefix[CacheT]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session_id: str) -> SessionPrefix[CacheT]:
        """The session, made empty if unknown."""
        session = self._sessions.get(session_id)
        if session is None:
            while len(self._sessions) >= self._max_sessions:
                self._on_drop(self._sessions.popitem(last=False)[0])
            session = self._sessions[session_id] = SessionPrefix(self._new_cache())
        self._sessions.move_to_end(session_id)
        return session

    def find(self, session_id: str) -> SessionPrefix[CacheT] | None:
        """The session if there is one."""
        return self._sessions.get(session_id)

    def drop(self, session_id: str) -> None:
        """Forgets the session and its cache."""
        if self._sessions.pop(session_id, None) is not None:
            self._on_drop(session_id)
