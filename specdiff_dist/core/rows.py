"""Sparse probability rows (CSR): what proposals and narrow target rows are made of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from specdiff_dist.errors import InvalidRows

IntArray = NDArray[np.int32]
IndexArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

_MAX_KEYED = 1 << 14  # entries; more would take longer to be given keys than to be searched without


@dataclass(frozen=True, eq=False)
class SparseRows:
    """`num_rows` sparse distributions over the vocabulary.

    Row r is `token_ids[row_splits[r]:row_splits[r+1]]` with `probs` alike. Token ids ascend strictly inside a row, so
    the inverse CDF over token order means the same draw on every machine. Probabilities travel as float32; *the*
    distribution meant is the float32 row divided by its own sum in float64 (`normalised`), on the side that samples
    as on the side that judges: that is what keeps trap 3 shut.

    The arrays must not change once rows are made of them: what a round asks for several times is computed once.
    """

    row_splits: IndexArray  # [num_rows + 1]
    token_ids: IntArray  # [nnz]
    probs: NDArray[np.float32]  # [nnz]

    @property
    def num_rows(self) -> int:
        return len(self.row_splits) - 1

    @cached_property
    def row_lengths(self) -> IndexArray:
        """Entries per row, [num_rows]."""
        return self.row_splits[1:] - self.row_splits[:-1]

    @staticmethod
    def from_rows(rows: list[tuple[NDArray[np.integer], NDArray[np.floating]]]) -> SparseRows:
        """Builds from `(token_ids, probs)` per row; ids need not be sorted, entries of probability 0 are dropped."""
        ids_parts: list[IntArray] = []
        prob_parts: list[NDArray[np.float32]] = []
        splits = np.zeros(len(rows) + 1, np.int64)
        for index, (ids, probs) in enumerate(rows):
            probs32 = np.asarray(probs, np.float32)
            keep = probs32 != 0
            ids32, probs32 = np.asarray(ids, np.int32)[keep], probs32[keep]
            order = np.argsort(ids32, kind="stable")
            ids_parts.append(ids32[order])
            prob_parts.append(probs32[order])
            splits[index + 1] = splits[index] + len(ids32)
        if not rows:
            return SparseRows(splits, np.zeros(0, np.int32), np.zeros(0, np.float32))
        return SparseRows(splits, np.concatenate(ids_parts), np.concatenate(prob_parts))

    @staticmethod
    def one_hot(token_ids: NDArray[np.integer] | list[int]) -> SparseRows:
        """One certain token per row (greedy or deterministic proposals)."""
        ids = np.asarray(token_ids, np.int32)
        return SparseRows(np.arange(len(ids) + 1, dtype=np.int64), ids, np.ones(len(ids), np.float32))

    @staticmethod
    def concatenate(parts: list[SparseRows]) -> SparseRows:
        """The rows of `parts`, one after the other."""
        if not parts:
            return SparseRows.from_rows([])
        lengths = np.concatenate([part.row_lengths for part in parts])
        splits = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        return SparseRows(
            splits, np.concatenate([p.token_ids for p in parts]), np.concatenate([p.probs for p in parts])
        )

    def row(self, index: int) -> tuple[IntArray, NDArray[np.float32]]:
        """`(token_ids, probs)` of one row, as views."""
        start, stop = self.row_splits[index], self.row_splits[index + 1]
        return self.token_ids[start:stop], self.probs[start:stop]

    def head(self, num_rows: int) -> SparseRows:
        """The first `num_rows` rows, as views."""
        if num_rows == self.num_rows:
            return self
        stop = self.row_splits[num_rows]
        head = SparseRows(self.row_splits[: num_rows + 1], self.token_ids[:stop], self.probs[:stop])
        known = self.__dict__
        for name, end in (("_row_index", stop), ("_keys", stop), ("_normalised", stop), ("_row_sums", num_rows)):
            if name in known:  # what was computed here holds there
                head.__dict__[name] = known[name][:end]
        return head

    def without_zeros(self) -> SparseRows:
        """The same distributions without entries of probability 0."""
        keep = self.probs != 0
        if keep.all():
            return self
        kept_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(keep)])
        return SparseRows(kept_before[self.row_splits], self.token_ids[keep], self.probs[keep])

    def row_index(self) -> IndexArray:
        """Row number of every entry, [nnz]."""
        return self._row_index

    def row_sums(self, values: NDArray[np.floating] | None = None) -> FloatArray:
        """Sum per row of `values` [nnz] (default: the probabilities), in float64."""
        if values is None:
            return self._row_sums
        return np.bincount(self._row_index, weights=values, minlength=self.num_rows).astype(np.float64, copy=False)

    def normalised(self) -> FloatArray:
        """Probabilities in float64 divided by their row's sum, [nnz]."""
        return self._normalised

    @cached_property
    def _row_index(self) -> IndexArray:
        return np.arange(self.num_rows, dtype=np.int64).repeat(self.row_lengths)

    @cached_property
    def _row_sums(self) -> FloatArray:
        return self.row_sums(self.probs)

    @cached_property
    def _normalised(self) -> FloatArray:
        return self.probs / self._row_sums.take(self._row_index)

    @cached_property
    def _keys(self) -> IndexArray:
        """Row and token of every entry in one number, [nnz]: ascending where rows are in order."""
        return (self._row_index << 32) | self.token_ids

    def check(self, *, vocab_size: int | None = None, what: str = "row") -> None:
        """Raises InvalidRows unless every row is a distribution (finite, ≥ 0, not empty, ids sorted and in range)."""
        if self._fault is not None:
            raise InvalidRows(f"{what}: {self._fault}")
        if vocab_size is not None and len(self.token_ids) and self.token_ids.max() >= vocab_size:
            raise InvalidRows(f"{what}: token id outside the vocabulary of {vocab_size}")

    @cached_property
    def _fault(self) -> str | None:
        """Why these are no distributions, in words."""
        splits, ids, probs = self.row_splits, self.token_ids, self.probs
        if len(splits) < 1 or splits[0] != 0 or splits[-1] != len(ids) or len(ids) != len(probs):
            return f"row_splits do not match {len(ids)} ids and {len(probs)} probabilities"
        if not len(ids):
            return "a row is empty" if self.num_rows else None
        if self.row_lengths.min() <= 0:
            return "a row is empty"
        if not (probs.min() >= 0.0 and probs.max() < np.inf):  # false for NaN
            return "NaN, infinite or negative probability"
        if ids.min() < 0:
            return "token id outside the vocabulary: negative"
        if not (self._keys[1:] > self._keys[:-1]).all():
            return "token ids not strictly ascending inside a row"
        if np.abs(self._row_sums - 1.0).max() > 1e-3:
            return "a row does not sum to 1"
        return None


def find(
    rows: SparseRows, row_index: IndexArray, token_ids: NDArray[np.integer]
) -> tuple[IndexArray, NDArray[np.bool_]]:
    """Where tokens stand among the entries of their rows: `(at [m], is_there [m])`; `at` means nothing where not there.

    One binary search for all. In wide rows it goes on inside their rows: its cost is that of the tokens asked for, however
    wide the rows are.

    Args:
        row_index: [m] row of each token; token_ids: [m].
    """
    if 0 < len(rows.token_ids) <= _MAX_KEYED:
        keys = (row_index << 32) | token_ids
        at = rows._keys.searchsorted(keys)
        return at, rows._keys.take(at, mode="clip") == keys
    ids, starts, stops = rows.token_ids, rows.row_splits[:-1][row_index], rows.row_splits[1:][row_index]
    if not len(ids) or not len(token_ids):
        return np.zeros(len(token_ids), np.int64), np.zeros(len(token_ids), bool)
    before = starts - 1  # the last entry known to be less than the token
    step = 1 << int(rows.row_lengths.max()).bit_length()
    while step := step >> 1:
        next_at = before + step
        before += step * ((next_at < stops) & (ids.take(next_at, mode="clip") < token_ids))
    at = before + 1
    return at, (at < stops) & (ids.take(at, mode="clip") == token_ids)


def entries_of(rows: SparseRows, token_ids: NDArray[np.integer]) -> IndexArray | None:
    """Where one token per row stands, [num_rows]; None unless each is there with a probability above 0."""
    at, is_there = find(rows, np.arange(rows.num_rows, dtype=np.int64), token_ids)
    return at if is_there.all() and (rows.probs.take(at) > 0.0).all() else None
