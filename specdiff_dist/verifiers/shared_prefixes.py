"""Prompts that begin alike are read once: what sessions have cached of their prompts, found by the hash of token blocks.

A session's cache is never shared, it begins with a copy: copying is memory traffic where reading is arithmetic, and no
session can then disturb another. Prompts of sessions that have ended stay until `max_tokens` newer ones have come.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from specdiff_dist.core.features import FeatureArray
from specdiff_dist.core.rows import IntArray

CacheT = TypeVar("CacheT")

BLOCK = 32  # tokens; prefixes are shared in whole blocks
MAX_TOKENS = 4096  # kept of ended sessions

CopyCache = Callable[[CacheT, int], CacheT]  # the first n tokens of a cache as a new one


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefix(Generic[CacheT]):
    """What one session cached first."""

    token_ids: IntArray  # [n]
    cache: CacheT  # begins with them
    feature_layers: tuple[int, ...]
    features: FeatureArray | None  # [n, F · H] of those layers
    keys: tuple[bytes, ...]  # of every whole block, each with all before it


class SharedPrefixes(Generic[CacheT]):
    """The prefixes of one replica's sessions, live and ended. Not thread-safe."""

    def __init__(self, copy_cache: CopyCache[CacheT], *, max_tokens: int = MAX_TOKENS) -> None:
        """max_tokens: of ended sessions; 0: live ones share nothing either."""
        self._copy_cache, self._max_tokens = copy_cache, max_tokens
        self._by_key: dict[bytes, SharedPrefix[CacheT]] = {}
        self._live: dict[str, SharedPrefix[CacheT]] = {}  # by session
        self._ended: OrderedDict[bytes, SharedPrefix[CacheT]] = OrderedDict()  # by last key, the least used first
        self.num_tokens = 0  # of ended sessions

    def find(self, token_ids: IntArray, feature_layers: tuple[int, ...]) -> tuple[SharedPrefix[CacheT], int] | None:
        """A prefix that begins like `token_ids`, and for how many tokens; one that knows these layers' features."""
        best: tuple[SharedPrefix[CacheT], int] | None = None
        for index, key in enumerate(block_keys(token_ids)):
            found = self._by_key.get(key)
            if found is None:
                break
            if not feature_layers or (found.features is not None and found.feature_layers == feature_layers):
                best = found, (index + 1) * BLOCK
        if best is None or not np.array_equal(best[0].token_ids[: best[1]], token_ids[: best[1]]):
            return None
        if best[0].keys[-1] in self._ended:
            self._ended.move_to_end(best[0].keys[-1])
        return best

    def add(
        self,
        session_id: str,
        token_ids: IntArray,
        cache: CacheT,
        feature_layers: tuple[int, ...],
        features: FeatureArray | None,
    ) -> None:
        """Tells what a session has just cached; its cache keeps beginning with it until `forget` or `end`."""
        keys = block_keys(token_ids) if self._max_tokens else ()
        if not keys:
            return
        prefix = SharedPrefix(token_ids, cache, feature_layers, features, keys)
        self._live[session_id] = prefix
        for key in keys:
            self._by_key[key] = prefix

    def forget(self, session_id: str) -> None:
        """The session's cache begins with it no longer, or is gone."""
        prefix = self._live.pop(session_id, None)
        if prefix is not None:
            self._drop(prefix)

    def cut(self, session_id: str, length: int) -> None:
        """The session's cache is cut to `length` tokens and goes on from there, perhaps with others than before."""
        prefix = self._live.get(session_id)
        if prefix is not None and length < len(prefix.token_ids):
            self.forget(session_id)

    def end(self, session_id: str) -> None:
        """The session ends: its prefix is kept for others if nobody else has it."""
        prefix = self._live.pop(session_id, None)
        if prefix is None:
            return
        num_tokens = len(prefix.keys) * BLOCK
        if self._by_key.get(prefix.keys[-1]) is not prefix or num_tokens > self._max_tokens:
            self._drop(prefix)
            return
        if (older := self._ended.pop(prefix.keys[-1], None)) is not None:
            self._drop_ended(older)
        kept = replace(prefix, cache=self._copy_cache(prefix.cache, num_tokens))
        for key in prefix.keys:
            if self._by_key.get(key) is prefix:
                self._by_key[key] = kept
        self._ended[kept.keys[-1]] = kept
        self.num_tokens += num_tokens
        while self.num_tokens > self._max_tokens:
            self._drop_ended(self._ended.popitem(last=False)[1])

    def _drop_ended(self, prefix: SharedPrefix[CacheT]) -> None:
        self.num_tokens -= len(prefix.keys) * BLOCK
        self._drop(prefix)

    def _drop(self, prefix: SharedPrefix[CacheT]) -> None:
        for key in prefix.keys:
            if self._by_key.get(key) is prefix:
                del self._by_key[key]


def block_keys(token_ids: IntArray) -> tuple[bytes, ...]:
    """A hash for every whole block of `token_ids` and all that is before it."""
    data = np.ascontiguousarray(token_ids, "<i4")
    keys, key = [], b""
    for start in range(0, len(data) - BLOCK + 1, BLOCK):
        key = hashlib.blake2b(key + data[start : start + BLOCK].tobytes(), digest_size=16).digest()
        keys.append(key)
    return tuple(keys)
