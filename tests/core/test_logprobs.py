from __future__ import annotations

import numpy as np
import pytest

from specdiff_dist.core.logprobs import TargetLogprobs, TokenLogprob, committed_logprobs
from specdiff_dist.core.rows import SparseRows
from specdiff_dist.errors import InvalidRows

TOP_IDS = np.array([[4, 1], [2, 3], [0, 1]], np.int32)
TOP = np.array([[-0.5, -1.0], [-0.25, -2.0], [-0.125, -3.0]], np.float32)
DRAFT = np.array([-0.75, -np.inf], np.float32)
ROWS = SparseRows.from_rows([(np.array(ids), np.full(2, 0.5)) for ids in ([1, 4], [2, 3], [0, 1])])
NARROW = TargetLogprobs(TOP_IDS, TOP, DRAFT, entries=np.array([-1, -0.5, -0.25, -2, -0.125, -3], np.float32))
WIDE = TargetLogprobs(
    TOP_IDS, TOP, DRAFT, recovered=np.array([-7, -8], np.float32), plain=np.array([-1, -2, -3], np.float32)
)
NO_ROWS = SparseRows.from_rows([])


def values(logprobs: TargetLogprobs, rows: SparseRows, token_ids: list[int], resolved=None) -> list[float]:
    return [one.logprob for one in committed_logprobs(logprobs, rows, np.array(token_ids, np.int32), resolved)]


def test_accepted_drafts_have_their_own_and_the_last_token_is_found_in_its_row():
    assert values(NARROW, ROWS, [4]) == [-0.5]  # rejected at once, recovered
    assert values(NARROW, ROWS, [9, 3]) == [-0.75, -2.0]
    assert values(NARROW, ROWS, [9, 9, 1]) == [-0.75, -np.inf, -3.0]  # a draft the target excludes, a bonus token


def test_wide_rows_bring_those_of_the_tokens_drawn_there():
    assert values(WIDE, NO_ROWS, [4]) == [-7.0]
    assert values(WIDE, NO_ROWS, [9, 3]) == [-0.75, -8.0]
    assert values(WIDE, NO_ROWS, [9, 9, 1]) == [-0.75, -np.inf, -3.0]
    assert values(WIDE, NO_ROWS, [9, 3], resolved=-11.0) == [-0.75, -11.0]


def test_the_most_probable_tokens_go_with_their_positions():
    one, two = committed_logprobs(NARROW, ROWS, np.array([9, 3], np.int32))
    assert one == TokenLogprob(-0.75, (4, 1), (-0.5, -1.0))
    assert two.top_token_ids == (2, 3)


def test_a_value_that_is_not_there_is_an_error_and_never_made_up():
    with pytest.raises(InvalidRows):
        values(NARROW, ROWS, [7])
