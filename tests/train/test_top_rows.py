"""The most probable tokens and the draw, against plain definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdiff_dist.train.top_rows import TOP, draw, top_logits


@pytest.mark.parametrize("vocab_size", [40, 5000, 128 * 50])
def test_top_logits_are_those_of_topk(vocab_size):
    logits = torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(0))
    logits[0, -1] = 50.0  # in the part behind the last whole chunk
    values, token_ids = top_logits(logits)
    expected = torch.topk(logits, TOP, dim=-1)
    assert torch.equal(values, expected.values)
    assert torch.equal(token_ids, expected.indices)


def test_a_vocabulary_below_the_count_gives_all_there_is():
    assert top_logits(torch.randn(2, 10))[0].shape == (2, 10)


def truncated(logits: torch.Tensor, temperature: float, top_p: float) -> np.ndarray:
    """The law by definition: the fewest most probable tokens that hold top_p, in float64."""
    probs = torch.softmax(logits.double() / temperature, dim=-1).numpy()
    order = np.argsort(-probs)
    num_kept = int((np.cumsum(probs[order]) < top_p).sum()) + 1
    law = np.zeros_like(probs)
    law[order[:num_kept]] = probs[order[:num_kept]]
    return law / law.sum()


@pytest.mark.parametrize("scale", [0.3, 4.0])  # wide rows, which the top tokens do not decide, and narrow ones
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.95), (1.0, 0.5)])
def test_draws_at_evenly_spaced_uniforms_follow_the_law(scale, temperature, top_p):
    num_draws, vocab_size = 20_000, 200
    logits = scale * torch.randn(vocab_size, generator=torch.Generator().manual_seed(1))
    rows = logits.expand(num_draws, -1)
    uniforms = (torch.arange(num_draws) + 0.5) / num_draws
    drawn = draw(
        rows, top_logits(rows, 16), torch.full((num_draws,), temperature), torch.full((num_draws,), top_p), uniforms
    )
    frequency = np.bincount(drawn.numpy(), minlength=vocab_size) / num_draws
    law = truncated(logits, temperature, top_p)
    assert set(np.flatnonzero(frequency)) <= set(np.flatnonzero(law))
    assert np.abs(frequency - law).max() < 2.0 / num_draws


def test_the_largest_uniform_stays_within_the_nucleus():
    logits = torch.linspace(3.0, 0.0, 300)[None]
    last = torch.tensor([1.0 - 2.0**-25])  # rounds to 1 in float32
    for top_p in (0.3, 0.95, 1.0):
        token = int(draw(logits, top_logits(logits), torch.ones(1), torch.tensor([top_p]), last))
        assert truncated(logits[0], 1.0, top_p)[token] > 0.0
