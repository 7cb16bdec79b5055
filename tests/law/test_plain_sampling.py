"""The lossless rule against plain sampling from the target by code that is not ours (K02 row 9)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import special, stats

from specdiff_dist.config import DecodeConfig, Effort, Linear, Lossless, Rule, Static
from specdiff_dist.transport.codec import decode_draft_block, encode_draft_block
from specdiff_dist.types import DraftBlock, DraftCall
from tests.doubles import TableDrafter, TableVerifier, make_request, random_table
from tests.law.enumeration import chunks

VOCAB = 6
PROMPT = (1, 4)
TABLE = random_table(VOCAB, 3, sharpness=1.0)


class Watched(TableDrafter):
    """Likes other tokens than the target. Its replies go over the wire, where they are noted."""

    def __init__(self, **given: Any) -> None:
        super().__init__(VOCAB, 5, **given)
        self.drawn = np.zeros(VOCAB, np.int64)
        self.reported = np.zeros(VOCAB)

    def draft(self, call: DraftCall) -> DraftBlock:
        block = decode_draft_block(encode_draft_block(super().draft(call)))
        self.drawn[block.token_ids[0]] += 1
        ids, probs = block.proposals.row(0)
        self.reported = np.zeros(VOCAB)
        self.reported[ids] = probs
        return block


def first_tokens(drafter: Watched, temperature: float, num_runs: int, rule: Rule) -> np.ndarray:
    """Histogram of the first token over as many seeds. It is decided by the drafter's token or its recovery."""
    config, verifier = DecodeConfig(rule, Effort(1), Static(1)), TableVerifier(TABLE, VOCAB)
    seen = np.zeros(VOCAB, np.int64)
    for seed in range(num_runs):
        request = make_request(PROMPT, max_tokens=2, temperature=temperature, seed=seed)
        seen[chunks(request, config, drafter, verifier, first=True)[0].token_ids[0]] += 1
    return seen


def plain_tokens(temperature: float, num_runs: int) -> np.ndarray:
    """The target alone: SciPy's softmax, NumPy's sampler."""
    law = special.softmax(TABLE(PROMPT).astype(np.float64) / temperature)
    return np.bincount(np.random.default_rng(11).choice(VOCAB, num_runs, p=law), minlength=VOCAB)


def pooled(observed: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Both histograms with the tokens that are expected less than 5 times put together, [2, cells]."""
    rare = expected < 5.0
    cells = np.array([np.append(counts[~rare], counts[rare].sum()) for counts in (observed, expected)])
    return cells[:, cells.sum(0) > 0]


def p_value(first: np.ndarray, second: np.ndarray) -> float:
    """Chi-square: were both histograms drawn from one law?"""
    result: Any = stats.chi2_contingency(pooled(first, second))
    return float(result.pvalue)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("num_runs", [2000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_first_tokens_have_the_targets_histogram(temperature: float, num_runs: int) -> None:
    drafter = Watched()
    seen = first_tokens(drafter, temperature, num_runs, Lossless())
    plain = plain_tokens(temperature, num_runs)
    value = p_value(seen, plain)
    print(f"\nT = {temperature}, {num_runs} tokens: p = {value:.4g}")
    assert value > 0.001
    assert p_value(drafter.drawn, plain) < 1e-6  # the drafter alone is far off
    cells = pooled(drafter.drawn, drafter.reported / drafter.reported.sum() * num_runs)
    assert stats.chisquare(*cells).pvalue > 0.001  # what it reports is what it draws from


@pytest.mark.parametrize(("dishonest", "rule"), [(True, Lossless()), (False, Linear(0.3))])
def test_the_histogram_shows_a_bias(dishonest: bool, rule: Rule) -> None:
    """A proposal reported at another temperature than it was drawn at, or a lossy rule, does not pass."""
    seen = first_tokens(Watched(dishonest=dishonest), 1.0, 2000, rule)
    assert p_value(seen, plain_tokens(1.0, 2000)) < 1e-6
