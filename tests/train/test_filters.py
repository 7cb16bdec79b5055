"""Which texts are left out."""

from __future__ import annotations

import numpy as np
import pytest

from specdiff_dist.train.filters import answer_fault, prompt_fault, repetition


def test_repetition_counts_n_grams_seen_before():
    assert repetition(np.arange(50)) == 0.0
    assert repetition(np.array([1, 2, 3])) == 0.0
    assert repetition(np.tile([1, 2, 3, 4, 5], 20)) == pytest.approx(1 - 5 / 97)
    assert repetition(np.array([1, 2, 1, 2, 1]), 2) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("token_ids", "fault"),
    [
        (np.arange(15), "short"),
        (np.arange(16), None),
        (np.tile(np.arange(10), 8), "repetition"),
        (np.concatenate([np.arange(60), np.arange(40)]), None),
    ],
)
def test_answers(token_ids, fault):
    assert answer_fault(token_ids) == fault


@pytest.mark.parametrize(
    ("token_ids", "ended", "fault"),
    [
        (np.arange(7), True, "length"),
        (np.arange(8), True, None),
        (np.arange(200), True, None),
        (np.arange(201), True, "length"),
        (np.arange(100), False, "length"),
        (np.tile(np.arange(6), 3), True, "repetition"),
    ],
)
def test_prompts(token_ids, ended, fault):
    assert prompt_fault(token_ids, ended=ended) == fault
