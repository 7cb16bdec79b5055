"""The replica's side of "the request states the prefix"."""

from __future__ import annotations

import numpy as np
import pytest

from specdiff_dist.errors import PrefixMismatch, StaleRound
from specdiff_dist.session_prefix import SessionPrefix, SessionTable
from specdiff_dist.types import PrefixStatement, prefix_crc

TOKENS = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int32)


def statement(prefix_len: int, new: int = 1, *, round_index: int = 0, tokens: np.ndarray = TOKENS) -> PrefixStatement:
    cached = tokens[:prefix_len]
    return PrefixStatement("s", round_index, prefix_len, prefix_crc(cached), tokens[prefix_len : prefix_len + new])


def session_with(num_tokens: int) -> SessionPrefix[None]:
    session: SessionPrefix[None] = SessionPrefix(None)
    session.extend(TOKENS[:num_tokens])
    return session


def test_crops_to_the_stated_prefix() -> None:
    session = session_with(6)
    assert session.agree(statement(4)) == 4
    assert session.token_ids.tolist() == TOKENS[:4].tolist()
    session.extend(TOKENS[4:7])
    assert session.cached_len == 7


def test_less_than_stated_is_told() -> None:
    with pytest.raises(PrefixMismatch) as caught:
        session_with(3).agree(statement(5))
    assert caught.value.cached_len == 3


def test_other_content_is_not_trusted() -> None:
    other = TOKENS.copy()
    other[1] = 7
    with pytest.raises(PrefixMismatch) as caught:
        session_with(6).agree(statement(4, tokens=other))
    assert caught.value.cached_len == 0
    session = session_with(6)
    session.agree(statement(1, tokens=other))  # the first token is the same


def test_rounds_never_go_back_and_retries_are_idempotent() -> None:
    session = session_with(6)
    session.agree(statement(4, round_index=3))
    session.extend(TOKENS[4:6])
    assert session.agree(statement(4, round_index=3)) == 4
    with pytest.raises(StaleRound):
        session.agree(statement(2, round_index=2))
    assert session.cached_len == 4  # a refused call changes nothing


def test_over_capacity_drops_the_least_recently_used() -> None:
    table: SessionTable[list[int]] = SessionTable(list, max_sessions=2)
    first = table.get("a")
    first.extend(TOKENS)
    table.get("b")
    table.get("a")
    table.get("c")
    assert len(table) == 2
    assert table.get("a") is first
    table.drop("a")
    table.drop("unknown")
    assert table.get("a").cached_len == 0
