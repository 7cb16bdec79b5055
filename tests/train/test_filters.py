"""Which texts are left out."""

from __future__ import annotations

import numpy as np
import pytest

from specdiff_dist.core.rows import IntArray
from specdiff_dist.train.filters import answer_fault, prompt_fault, repetition


def numbers(count: int) -> IntArray:
    return np.arange(count, dtype=np.int32)


def test_repetition_counts_n_grams_seen_before():
    assert repetition(numbers(50)) == 0.0
    assert repetition(np.array([1, 2, 3], np.int32)) == 0.0
    assert repetition(np.tile(numbers(5), 20)) == pytest.approx(1 - 5 / 97)
    assert repetition(np.array([1, 2, 1, 2, 1], np.int32), 2) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("token_ids", "fault"),
    [
        (numbers(15), "short"),
        (numbers(16), None),
        (np.tile(numbers(10), 8), "repetition"),
        (np.concatenate([numbers(60), numbers(40)]), None),
    ],
)
def test_answers(token_ids, fault):
    assert answer_fault(token_ids) == fault


@pytest.mark.parametrize(
    ("token_ids", "ended", "fault"),
    [
        (numbers(7), True, "length"),
        (numbers(8), True, None),
        (numbers(200), True, None),
        (numbers(201), True, "length"),
        (numbers(100), False, "length"),
        (np.tile(numbers(6), 3), True, "repetition"),
    ],
)
def test_prompts(token_ids, ended, fault):
    assert prompt_fault(token_ids, ended=ended) == fault
