from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specdiff_dist.core.acceptance import accept
from specdiff_dist.core.rows import SparseRows
from specdiff_dist.core.rules import Linear, Lossless
from specdiff_dist.errors import InvalidRequest, InvalidRows
from specdiff_dist.types import PrefixStatement, SamplingParams, TargetRows, VerifyCall
from specdiff_dist.verifiers import target_rows as module
from specdiff_dist.verifiers import wide_draws
from specdiff_dist.verifiers.target_rows import target_rows

PREFIX = PrefixStatement("s", 0, 0, 0, np.array([1], np.int32))


def make_call(num_draft: int, sampling: SamplingParams, proposals: SparseRows | None = None, uniforms=None):
    uniforms = np.full(num_draft + 1, 0.5) if uniforms is None else uniforms
    return VerifyCall(PREFIX, np.zeros(num_draft, np.int32), sampling, proposals, uniforms)


def rows_of(logits: torch.Tensor, sampling: SamplingParams, proposals=None, uniforms=None) -> TargetRows:
    return target_rows(logits, make_call(len(logits) - 1, sampling, proposals, uniforms), cached_len=7)


def everything(num_rows: int, vocab_size: int) -> SparseRows:
    flat = np.full(vocab_size, 1.0 / vocab_size, np.float32)
    return SparseRows.from_rows([(np.arange(vocab_size), flat)] * num_rows)


def dense_law(target: TargetRows, vocab_size: int) -> np.ndarray:
    """Whole rows in float64, as far as the reply holds them."""
    law = np.zeros((target.rows.num_rows, vocab_size))
    law[target.rows.row_index(), target.rows.token_ids] = target.rows.probs
    return law / target.row_mass[: target.rows.num_rows, None]


def warped(logits: torch.Tensor, sampling: SamplingParams) -> np.ndarray:
    """What transformers' generate samples from."""
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits.clone())  # pyright: ignore[reportArgumentType]
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)  # pyright: ignore[reportArgumentType]
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)  # pyright: ignore[reportArgumentType]
    return torch.softmax(scores.double(), dim=-1).numpy()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, 280, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-4])
def test_rows_are_those_of_the_transformers_warpers(temperature, top_k, top_p):
    logits = 2.0 * torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    sampling = SamplingParams(temperature, top_k, top_p)
    target = rows_of(logits, sampling, everything(5, 300))
    expected = warped(logits, sampling)
    got = dense_law(target, 300)
    np.testing.assert_allclose(got, expected[: len(got)], atol=2e-7)
    np.testing.assert_array_equal(got > 0, expected[: len(got)] > 0)
    assert len(target.row_mass) == 6
    assert target.cached_len == 7
    narrow = (expected > 0).sum(axis=1).max() <= 256
    assert target.is_wide == (not narrow)
    if narrow:
        target.rows.check(vocab_size=300)
    np.testing.assert_allclose(target.row_mass, 1.0, atol=1e-5)


def test_top_k_keeps_every_token_tied_with_the_kth():
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]])
    target = rows_of(logits, SamplingParams(1.0, top_k=2))
    assert target.rows.token_ids.tolist() == [0, 2, 3, 4]


def test_ties_that_make_a_top_k_row_too_long_make_it_wide():
    logits = torch.zeros(2, 300)
    target = rows_of(logits, SamplingParams(1.0, top_k=2), everything(1, 300))
    assert target.is_wide
    assert target.plain_token_ids is not None
    assert target.plain_token_ids.tolist() == [150, 150]


def test_top_p_takes_the_lower_ids_among_equals():
    logits = torch.log(torch.tensor([[0.1, 0.25, 0.1, 0.3, 0.25]]))
    assert rows_of(logits, SamplingParams(1.0, top_p=0.5)).rows.token_ids.tolist() == [1, 3]
    assert rows_of(logits, SamplingParams(1.0, top_p=0.84)).rows.token_ids.tolist() == [0, 1, 3, 4]


def test_top_p_counts_after_top_k_has_renormalised():
    logits = torch.log(torch.tensor([[0.4, 0.25, 0.2, 0.15]]))  # top-k 2 leaves .615 and .385
    assert rows_of(logits, SamplingParams(1.0, top_p=0.6)).rows.token_ids.tolist() == [0, 1]
    assert rows_of(logits, SamplingParams(1.0, top_k=2, top_p=0.6)).rows.token_ids.tolist() == [0]


def test_greedy_rows_are_one_hot_at_the_first_largest_logit():
    logits = torch.tensor([[0.0, 5.0, 5.0], [1.0, 0.0, -torch.inf], [2.0, 2.0, 2.0]])
    target = rows_of(logits, SamplingParams(0.0))
    assert target.rows.token_ids.tolist() == [1, 0, 0]
    assert target.rows.probs.tolist() == [1.0, 1.0, 1.0]
    assert target.row_mass.tolist() == [1.0, 1.0, 1.0]


def test_top_k_1_equals_greedy():
    logits = torch.randn(9, 500, generator=torch.Generator().manual_seed(3))
    sampled, greedy = rows_of(logits, SamplingParams(1.0, top_k=1)), rows_of(logits, SamplingParams(0.0))
    assert sampled.rows.token_ids.tolist() == greedy.rows.token_ids.tolist()


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_give_the_greedy_token(temperature):
    logits = 10.0 * torch.randn(4, 200, generator=torch.Generator().manual_seed(4))
    target = rows_of(logits, SamplingParams(temperature))
    assert target.rows.token_ids.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("sampling", [SamplingParams(0.0), SamplingParams(1.0), SamplingParams(1.0, 3, 0.5)])
def test_no_token_is_made_up_from_broken_logits(bad, sampling):
    logits = torch.zeros(3, 1000)
    logits[1, 700] = bad
    with pytest.raises(InvalidRows, match="1 of 3"):
        rows_of(logits, sampling, everything(2, 1000))
    logits[1] = torch.nan
    with pytest.raises(InvalidRows):
        rows_of(logits, sampling, everything(2, 1000))
    logits[1] = -torch.inf
    with pytest.raises(InvalidRows):
        rows_of(logits, sampling, everything(2, 1000))


def test_minus_infinity_forbids_a_token():
    logits = torch.zeros(2, 1000)
    logits[:, 1:999] = -torch.inf
    target = rows_of(logits, SamplingParams(1.0), everything(1, 1000), np.array([0.0, 1.0 - 2.0**-53]))
    assert target.plain_token_ids is not None
    assert target.plain_token_ids.tolist() == [0, 999]
    assert rows_of(logits, SamplingParams(1.0, top_k=5)).rows.token_ids.tolist() == [0, 999, 0, 999]


def test_wide_rows_need_the_proposals():
    logits = torch.zeros(3, 1000)
    with pytest.raises(InvalidRequest, match="brought none"):
        rows_of(logits, SamplingParams(1.0))
    with pytest.raises(InvalidRequest, match="brought 1"):
        rows_of(logits, SamplingParams(1.0), everything(1, 1000))
    with pytest.raises(InvalidRequest, match="uniforms"):
        rows_of(logits, SamplingParams(1.0), everything(2, 1000), np.zeros(2))
    with pytest.raises(InvalidRows, match="vocabulary"):
        rows_of(logits, SamplingParams(1.0), everything(2, 1001))


def test_plain_decoding_needs_no_proposals():
    target = rows_of(torch.zeros(1, 1000), SamplingParams(1.0), None, np.array([0.75]))
    assert target.plain_token_ids is not None
    assert target.recovered_token_ids is not None
    assert target.plain_token_ids.tolist() == [750]
    assert target.recovered_token_ids.tolist() == []
    assert target.rows.num_rows == 0


def random_proposal(rng: np.random.Generator, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A truncated proposal: near the target, far from it, equal to it, or one-hot."""
    vocab_size = len(row)
    kind = rng.integers(4)
    if kind == 0:
        return np.array([rng.integers(vocab_size)]), np.ones(1)
    if kind == 1:
        return np.arange(vocab_size), row
    ids = np.sort(rng.choice(vocab_size, rng.integers(1, vocab_size + 1), replace=False))
    weights = row[ids] + 1e-3 if kind == 2 else rng.random(len(ids)) + 1e-6
    return ids, weights / weights.sum()


@pytest.mark.parametrize("rule", [Lossless(), Linear(0.3)])
def test_accept_gives_the_same_on_narrow_and_wide_replies(rule, monkeypatch):
    monkeypatch.setattr(wide_draws, "_BLOCK", 4)  # several blocks even in small rows
    rng = np.random.default_rng(5)
    num_rejected = 0
    for _ in range(1500):
        num_draft, vocab_size = int(rng.integers(0, 5)), int(rng.integers(2, 23))
        logits = torch.from_numpy((3.0 * rng.standard_normal((num_draft + 1, vocab_size))).astype(np.float32))
        sampling = SamplingParams(
            float(rng.choice([0.5, 1.0, 2.0])), int(rng.choice([0, 0, 3])), float(rng.choice([1, 0.8]))
        )
        probs = torch.softmax(logits, -1).numpy()
        proposals = SparseRows.from_rows([random_proposal(rng, probs[i]) for i in range(num_draft)])
        uniforms = rng.random(num_draft + 1)
        drafted = [int(rng.choice(proposals.row(i)[0])) for i in range(num_draft)]
        draft_ids = np.array(drafted, np.int32)
        accept_uniforms = rng.random(num_draft)

        outcomes = []
        for limit, is_wide in ((256, False), (0, True)):
            monkeypatch.setattr(module, "MAX_NARROW_SUPPORT", limit)
            target = rows_of(logits, sampling, proposals, uniforms)
            assert target.is_wide == is_wide
            outcomes.append(accept(rule, draft_ids, proposals, target, accept_uniforms, uniforms))
        narrow, wide = outcomes
        assert narrow.num_accepted == wide.num_accepted
        assert narrow.token_ids.tolist() == wide.token_ids.tolist()
        np.testing.assert_allclose(narrow.tv, wide.tv, atol=1e-6)
        num_rejected += narrow.num_accepted < num_draft
    assert num_rejected > 300


@pytest.mark.parametrize("vocab_size", [257, 1000])
def test_wide_draws_are_the_inverse_cdf(vocab_size):
    """A grid of uniforms hits every token in proportion: to its probability, and to its residual."""
    rng = np.random.default_rng(6)
    num = 4000
    grid = (np.arange(num) + 0.5) / num
    row = rng.dirichlet(np.full(vocab_size, 0.1)).astype(np.float32)
    draft_ids = np.sort(rng.choice(vocab_size, 40, replace=False))
    draft_probs = rng.dirichlet(np.ones(40)).astype(np.float32)
    proposals = SparseRows.from_rows([(draft_ids, draft_probs)] * (num - 1))
    drawn = wide_draws.draw_wide(torch.from_numpy(np.tile(row, (num, 1))), proposals, grid)

    law = row.astype(np.float64) / row.astype(np.float64).sum()
    residual = law.copy()
    residual[draft_ids] -= draft_probs / draft_probs.astype(np.float64).sum()
    residual = np.maximum(residual, 0.0)
    for drawn_ids, weights in ((drawn.plain_token_ids, law), (drawn.recovered_token_ids, residual / residual.sum())):
        assert np.all(np.diff(drawn_ids) >= 0)
        frequency = np.bincount(drawn_ids, minlength=vocab_size) / num
        assert np.abs(np.cumsum(frequency) - np.cumsum(weights)).max() < 1.5 / num
        assert np.all(weights[drawn_ids] > 0)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2.0**-53])
def test_an_empty_residual_gives_the_plain_token(uniform):
    one_hot = torch.zeros(2, 300)
    one_hot[:, 299] = 1.0
    drawn = wide_draws.draw_wide(one_hot, SparseRows.one_hot([299]), np.full(2, uniform))
    assert drawn.recovered_token_ids.tolist() == [299]
    assert drawn.plain_token_ids.tolist() == [299, 299]


def test_a_recovered_token_is_never_one_the_proposal_covers():
    """All residual mass sits on one token of another block than the target's bulk."""
    probs = torch.zeros(2, 600)
    probs[:, 3], probs[:, 599] = 1.0 - 2.0**-20, 2.0**-20
    drawn = wide_draws.draw_wide(probs, SparseRows.one_hot([3]), np.array([1e-9, 1e-9]))
    assert drawn.recovered_token_ids.tolist() == [599]
    assert drawn.plain_token_ids.tolist() == [3, 3]
    assert drawn.on_support.tolist() == [1.0 - 2.0**-20]
