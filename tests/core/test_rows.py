"""SparseRows: construction, lookups, and what `check` refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdiff_dist.core import rows as rows_module
from specdiff_dist.core.rows import SparseRows, entries_of, find
from specdiff_dist.errors import InvalidRows


def rows_of(*rows: dict[int, float]) -> SparseRows:
    return SparseRows.from_rows([(np.array(list(row)), np.array(list(row.values()))) for row in rows])


def test_from_rows_sorts_and_drops_zeros() -> None:
    rows = rows_of({7: 0.25, 2: 0.75, 5: 0.0}, {1: 1.0})
    assert rows.row_splits.tolist() == [0, 2, 3] and rows.token_ids.tolist() == [2, 7, 1]
    rows.check(vocab_size=8)


@given(st.integers(1, 6), st.integers(2, 40), st.integers(0, 2**32 - 1))
def test_sparse_equals_dense(num_rows: int, vocab: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    dense = rng.random((num_rows, vocab)).astype(np.float32) * (rng.random((num_rows, vocab)) < 0.5)
    dense[:, 0] += 0.1
    dense /= dense.sum(1, keepdims=True)
    rows = SparseRows.from_rows([(np.arange(vocab), row) for row in dense])
    rows.check(vocab_size=vocab)
    np.testing.assert_allclose(rows.row_sums(), dense.astype(np.float64).sum(1), rtol=1e-12)
    tokens = rng.integers(0, vocab, num_rows)
    law = dense.astype(np.float64) / dense.astype(np.float64).sum(1, keepdims=True)
    at, is_there = find(rows, np.arange(num_rows), tokens)
    np.testing.assert_array_equal(is_there, dense[np.arange(num_rows), tokens] > 0)
    found = rows.normalised()[at[is_there]]
    np.testing.assert_allclose(found, law[np.arange(num_rows), tokens][is_there], rtol=1e-12)
    keep = int(rng.integers(0, num_rows + 1))
    joined = SparseRows.concatenate(
        [rows.head(keep), SparseRows.from_rows([rows.row(i) for i in range(keep, num_rows)])]
    )
    np.testing.assert_array_equal(joined.row_splits, rows.row_splits)
    np.testing.assert_array_equal(joined.token_ids, rows.token_ids)


def test_one_hot_and_empty() -> None:
    rows = SparseRows.one_hot([4, 4, 0])
    rows.check(vocab_size=5)
    assert rows.num_rows == 3 and rows.row_sums().tolist() == [1.0, 1.0, 1.0]
    empty = SparseRows.from_rows([])
    empty.check()
    assert empty.num_rows == 0 and len(empty.normalised()) == 0
    found = entries_of(empty, np.zeros(0, np.int32))
    assert found is not None and len(found) == 0


@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_tokens_are_found_alike_in_narrow_and_in_wide_rows(num_rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rows_of(
        *(dict.fromkeys(rng.choice(30, rng.integers(1, 9), replace=False).tolist(), 0.5) for _ in range(num_rows))
    )
    row_index, token_ids = rng.integers(0, num_rows, 40), rng.integers(-1, 31, 40).astype(np.int32)
    narrow_at, narrow_there = find(rows, row_index, token_ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "_MAX_KEYED", 0)
        wide_at, wide_there = find(rows, row_index, token_ids)
    np.testing.assert_array_equal(narrow_there, wide_there)
    np.testing.assert_array_equal(narrow_at[narrow_there], wide_at[wide_there])
    expected = [token in rows.row(int(row))[0] for row, token in zip(row_index, token_ids, strict=True)]
    assert narrow_there.tolist() == expected


def test_entries_of_wants_every_token_to_be_possible() -> None:
    rows = rows_of({3: 0.5, 7: 0.5}, {2: 1.0})
    found = entries_of(rows, np.array([7, 2], np.int32))
    assert found is not None and found.tolist() == [1, 2]
    assert entries_of(rows, np.array([7, 3], np.int32)) is None
    impossible = SparseRows(rows.row_splits, rows.token_ids, np.array([1.0, 0.0, 1.0], np.float32))
    assert entries_of(impossible, np.array([7, 2], np.int32)) is None


def test_the_head_of_all_rows_is_the_rows_themselves() -> None:
    rows = rows_of({3: 0.5, 7: 0.5}, {2: 1.0})
    assert rows.head(2) is rows and rows.head(1).row_sums().tolist() == [1.0]


def test_a_head_is_the_same_whether_its_rows_were_used_before_or_not() -> None:
    fresh, used = (rows_of({3: 0.5, 7: 0.25}, {2: 1.0, 4: 0.5}, {1: 1.0}).head(3) for _ in range(2))
    used.normalised()
    assert entries_of(used, np.array([3, 2, 1])) is not None
    for num_rows in (0, 1, 2):
        one, other = fresh.head(num_rows), used.head(num_rows)
        np.testing.assert_array_equal(one.normalised(), other.normalised())
        np.testing.assert_array_equal(one.row_sums(), other.row_sums())
        np.testing.assert_array_equal(one.row_index(), other.row_index())
        np.testing.assert_array_equal(find(one, *_all(one))[0], find(other, *_all(other))[0])


def _all(rows: SparseRows) -> tuple[np.ndarray, np.ndarray]:
    return rows.row_index(), rows.token_ids


def broken(splits: list[int], ids: list[int], probs: list[float]) -> SparseRows:
    return SparseRows(np.array(splits, np.int64), np.array(ids, np.int32), np.array(probs, np.float32))


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (broken([0, 2], [1], [1.0]), "row_splits"),
        (broken([1, 1], [1], [1.0]), "row_splits"),
        (broken([], [], []), "row_splits"),
        (broken([0, 1, 1], [1], [1.0]), "empty"),
        (broken([0, 2, 1, 3], [1, 2, 3], [0.5, 0.5, 1.0]), "empty"),
        (broken([0, 1], [1], [float("nan")]), "NaN"),
        (broken([0, 1], [1], [float("inf")]), "NaN"),
        (broken([0, 2], [1, 2], [1.5, -0.5]), "negative"),
        (broken([0, 1], [-1], [1.0]), "outside the vocabulary"),
        (broken([0, 1], [10], [1.0]), "outside the vocabulary"),
        (broken([0, 2], [2, 1], [0.5, 0.5]), "ascending"),
        (broken([0, 2], [1, 1], [0.5, 0.5]), "ascending"),
        (broken([0, 2], [1, 2], [0.5, 0.4]), "sum to 1"),
    ],
)
def test_check_refuses(rows: SparseRows, text: str) -> None:
    with pytest.raises(InvalidRows, match=text):
        rows.check(vocab_size=10)
