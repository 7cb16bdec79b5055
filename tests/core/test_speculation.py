"""Speculation policies."""

from __future__ import annotations

import numpy as np
import pytest

from specdiff_dist.core.speculation import ConfidenceThreshold, Off, Policy, Static, choose_length, num_to_draft
from specdiff_dist.errors import InvalidConfig

TOKEN = np.array([0.2, 0.9, 0.4, 0.9], np.float32)
LARGEST = np.array([0.5, 0.9, 0.6, 0.3], np.float32)


@pytest.mark.parametrize(
    ("policy", "drafted", "length"),
    [
        (Off(), 0, 0),
        (Static(4), 4, 4),
        (Static(2), 2, 2),
        (Static(9), 9, 4),
        (ConfidenceThreshold(0.5, 8), 8, 3),
        (ConfidenceThreshold(0.95, 8), 8, 1),
        (ConfidenceThreshold(0.0, 8), 8, 4),
        (ConfidenceThreshold(0.5, 8, "token_prob"), 8, 2),
    ],
)
def test_lengths(policy: Policy, drafted: int, length: int) -> None:
    assert num_to_draft(policy) == drafted
    assert choose_length(policy, TOKEN, LARGEST) == length
    nothing = np.zeros(0, np.float32)
    assert choose_length(policy, nothing, nothing) == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Static(0),
        lambda: Static(257),
        lambda: ConfidenceThreshold(1.5, 4),
        lambda: ConfidenceThreshold(float("nan"), 4),
        lambda: ConfidenceThreshold(0.5, 4, "entropy"),
    ],
)
def test_out_of_range(make) -> None:
    with pytest.raises(InvalidConfig):
        make()
