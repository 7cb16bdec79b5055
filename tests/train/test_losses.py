from __future__ import annotations

import numpy as np
import pytest
import torch

from specdiff_dist.errors import InvalidConfig
from specdiff_dist.train.blocks import BlockBatch, Targets
from specdiff_dist.train.losses import LossOptions, block_loss, distances

NUM_COLUMNS = 12


def targets_of(laws: torch.Tensor, *, lacking: int = 0) -> Targets:
    """Laws [P, 12 + lacking] as targets; the last `lacking` tokens are none of the drafter's."""
    top = torch.topk(laws, 6, dim=-1)
    has = top.indices < laws.shape[1] - lacking
    columns = torch.where(has, top.indices, 0)
    first = torch.where(has[:, 0], top.indices[:, 0], -1)
    return Targets(columns, torch.where(has, top.values, 0.0), first, first)


def batch_of(targets: Targets, wanted: list[int], *, num_blocks: int, size: int) -> BlockBatch:
    blocks = torch.zeros(num_blocks, size, dtype=torch.int64)
    return BlockBatch(
        torch.zeros(1, dtype=torch.int64), (0, 1), blocks, torch.ones(num_blocks, dtype=torch.int64), (0, num_blocks),
        torch.tensor(wanted), targets,
    )  # fmt: skip


def random_laws(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.softmax(3 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)), dim=-1)


def test_distances_are_those_of_the_laws():
    laws, logits = random_laws(5, 6, 0), 2 * torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    found = distances(logits, targets_of(laws))  # six columns, six kept: nothing is missing
    p, q = laws.double(), torch.softmax(logits.double(), dim=-1)
    np.testing.assert_allclose(found.kl, (p * (p.log() - q.log())).sum(dim=-1), rtol=1e-4)
    np.testing.assert_allclose(1 - found.overlap, 0.5 * (p - q).abs().sum(dim=-1), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.cross_entropy, -q.log()[range(5), laws.argmax(dim=-1)], rtol=1e-4)


def test_tokens_the_drafter_lacks_are_no_aim_and_count_as_lost():
    laws = random_laws(40, NUM_COLUMNS + 4, 2)
    targets = targets_of(laws, lacking=4)
    kept = targets.probs > 0
    aim = torch.zeros(40, NUM_COLUMNS).scatter_add_(1, targets.columns, targets.probs)
    perfect = (aim / aim.sum(dim=-1, keepdim=True)).clamp(min=1e-30).log()
    found = distances(perfect, targets)
    np.testing.assert_allclose(found.kl, 0.0, atol=1e-5)
    np.testing.assert_allclose(found.overlap, (targets.probs * kept).sum(dim=-1), rtol=1e-5)
    assert torch.all(found.cross_entropy[targets.top_column < 0] == 0) and (targets.top_column < 0).any()


@pytest.mark.parametrize("weighting", ["decay", "length"])
def test_a_step_against_the_gradient_raises_the_expected_length(weighting):
    laws = random_laws(8, NUM_COLUMNS, 3)
    batch = batch_of(targets_of(laws), list(range(8)), num_blocks=2, size=4)
    logits = torch.zeros(8, NUM_COLUMNS, requires_grad=True)

    def expected_length() -> float:
        overlap = distances(logits.detach(), batch.targets).overlap.view(2, 4)
        return float(torch.cumprod(overlap, dim=1).sum())

    for shares in ({"kl": 1.0}, {"tv": 1.0, "kl": 0.0}, {"cross_entropy": 1.0, "kl": 0.0}):
        options = LossOptions(**{"kl": 0.0, "cross_entropy": 0.0, **shares}, weighting=weighting)
        before = expected_length()
        loss, terms = block_loss(logits, batch, options)
        (gradient,) = torch.autograd.grad(loss, logits)
        assert set(terms) == {"kl", "tv", "cross_entropy"}
        kept = logits.detach().clone()
        logits.data -= 2.0 * gradient
        assert expected_length() > before
        logits.data.copy_(kept)


def test_decay_weights_early_positions_more():
    laws = random_laws(4, NUM_COLUMNS, 4)
    logits = torch.randn(4, NUM_COLUMNS, generator=torch.Generator().manual_seed(5))
    batch = batch_of(targets_of(laws), [0, 1, 2, 3], num_blocks=1, size=4)
    loss, _ = block_loss(logits, batch, LossOptions(kl=1.0, cross_entropy=0.0, decay=2.0))
    weights = np.exp(-np.arange(4) / 2.0)
    np.testing.assert_allclose(loss, np.average(distances(logits, batch.targets).kl, weights=weights), rtol=1e-5)


def test_length_weights_are_the_derivative_of_the_expected_length():
    laws = random_laws(5, NUM_COLUMNS, 6)
    logits = torch.randn(5, NUM_COLUMNS, generator=torch.Generator().manual_seed(7))
    wanted = [0, 1, 2, 5, 6]  # the second block's first position has its token given: a product over slots 1 and 2
    batch = batch_of(targets_of(laws), wanted, num_blocks=2, size=4)
    found = distances(logits, batch.targets)
    a = found.overlap.detach().clone().requires_grad_()
    length = a[0] + a[0] * a[1] + a[0] * a[1] * a[2] + a[3] + a[3] * a[4]
    (weights,) = torch.autograd.grad(length, a)
    loss, _ = block_loss(logits, batch, LossOptions(kl=1.0, cross_entropy=0.0, weighting="length"))
    np.testing.assert_allclose(loss, np.average(found.kl, weights=weights), rtol=1e-5)


def test_options_are_checked():
    for bad in ({"weighting": "even"}, {"kl": -1.0}, {"kl": 0.0, "cross_entropy": 0.0}, {"decay": 0.0}):
        with pytest.raises(InvalidConfig):
            LossOptions(**bad)  # pyright: ignore[reportArgumentType]
