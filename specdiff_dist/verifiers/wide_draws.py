"""Draws from rows that are too wide to send: inverse CDF over token order, where the rows live.

Per 256-token block one float64 sum; a draw searches the block sums, then inside one block. So a row is read once,
whatever is drawn from it, and every weight used is either a row's own entry or a difference at one token: no sum is
ever found by subtracting sums, which would leave rounding noise where the residual is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdiff_dist.core.rows import FloatArray, IntArray, SparseRows

_BLOCK = 256  # tokens per partial sum


@dataclass(frozen=True, slots=True, eq=False)
class WideDraws:
    """What a wide reply carries (types.TargetRows), on the CPU."""

    on_support: NDArray[np.float32]  # [nnz of the proposals]
    row_mass: FloatArray  # [n]
    recovered_token_ids: IntArray  # [n - 1]
    plain_token_ids: IntArray  # [n]


@dataclass(frozen=True, slots=True, eq=False)
class _Support:
    """The proposals' entries on the rows' device: where a row's weight differs from its probability."""

    row_index: Tensor  # int64 [nnz]
    token_ids: Tensor  # int64 [nnz]


def draw_wide(probs: Tensor, proposals: SparseRows, uniforms: FloatArray) -> WideDraws:
    """Draws, per row i, a plain token from the row and (i < n - 1) a recovered token from norm([p - q]+), by uniforms[i].

    Where the residual is empty (p = q up to rounding) the recovered token is the plain one. Agrees with
    core.acceptance on the whole rows, apart from uniforms within rounding (1e-15) of a step of the CDF.

    Args:
        probs: float32 [n, V], ≥ 0, every row with mass. Overwritten.
        proposals: n - 1 rows, ids < V.
        uniforms: float64 [n].
    """
    device, num_rows = probs.device, probs.shape[0]
    probs = torch.nn.functional.pad(probs, (0, -probs.shape[1] % _BLOCK))
    blocks = probs.view(num_rows, -1, _BLOCK)
    support = _Support(
        torch.from_numpy(proposals.row_index()).to(device), torch.from_numpy(proposals.token_ids).long().to(device)
    )
    draft_probs = torch.from_numpy(proposals.normalised()).to(device)
    u = torch.from_numpy(np.ascontiguousarray(uniforms, np.float64)).to(device)

    on_support = probs[support.row_index, support.token_ids]
    probs[support.row_index, support.token_ids] = 0.0
    rest = blocks.sum(dim=-1, dtype=torch.float64)  # [n, V / 256] without the support
    plain_weights = on_support.double()
    mass = _with_support(rest, support, plain_weights).sum(dim=-1)
    plain = _draw(blocks, rest, torch.ones_like(mass), support, plain_weights, u)

    residual_weights = torch.clamp(plain_weights / mass[support.row_index] - draft_probs, min=0.0)
    residual_rest = rest[:-1] / mass[:-1, None]
    recovered = _draw(blocks[:-1], residual_rest, mass[:-1], support, residual_weights, u[:-1])
    is_empty = _with_support(residual_rest, support, residual_weights).sum(dim=-1) <= 0.0
    recovered = torch.where(is_empty, plain[:-1], recovered)
    return WideDraws(
        on_support.cpu().numpy(),
        mass.cpu().numpy(),
        recovered.to(torch.int32).cpu().numpy(),
        plain.to(torch.int32).cpu().numpy(),
    )


def _with_support(rest: Tensor, support: _Support, weights: Tensor) -> Tensor:
    """Block sums [n, blocks] of rows that have `weights` on the support and `rest` elsewhere."""
    return rest.index_put((support.row_index, support.token_ids // _BLOCK), weights, accumulate=True)


def _draw(blocks: Tensor, rest: Tensor, scale: Tensor, support: _Support, weights: Tensor, uniforms: Tensor) -> Tensor:
    """One token id per row, int64 [n], from weights blocks / scale outside the support and `weights` on it."""
    num_rows = len(rest)
    if num_rows == 0:
        return torch.zeros(0, dtype=torch.int64, device=rest.device)
    cumulative, goal = _cdf(_with_support(rest, support, weights), uniforms)
    block = _first_above(cumulative, goal)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)

    rows = torch.arange(num_rows, device=rest.device)
    inside = blocks[rows, block].double() / scale[:, None]
    is_inside = support.token_ids // _BLOCK == block[support.row_index]
    inside.index_put_(
        (support.row_index, support.token_ids % _BLOCK), torch.where(is_inside, weights, 0.0), accumulate=True
    )
    offset = _first_above(torch.cumsum(inside, dim=-1), goal - before)
    return block * _BLOCK + offset


def _cdf(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    cumulative = torch.cumsum(weights, dim=-1)
    return cumulative, uniforms * cumulative[:, -1]


def _first_above(cumulative: Tensor, goal: Tensor) -> Tensor:
    """First index whose cumulative weight exceeds `goal`, so never one of weight 0; the last index of positive weight
    where rounding lifted `goal` to the total. [n]"""
    above = torch.searchsorted(cumulative, goal[:, None], right=True)[:, 0]
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())[:, 0]
    return torch.minimum(above, last)
