"""Matrices of the draft model in 8 bits (in floating point: verifiers/packed_linear.py)."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from specdiff_dist.verifiers.kernels import BLOCK, BlockMatrix, why_no_kernels
from specdiff_dist.verifiers.packed_linear import Linear


def int8_linear(weight: Tensor) -> Linear:
    """As `make_linear`, float32 in and out, with the weight in 8 bits (CPU only; a quarter of the memory traffic, which is
    what a draft step costs): in blocks that our kernels multiply, or where those do not run, by torch's operator."""
    if weight.shape[1] % BLOCK == 0 and not why_no_kernels():
        return BlockMatrix.nearest(weight)
    return torch_int8_linear(weight)


def torch_int8_linear(weight: Tensor) -> Linear:
    """As `make_linear`, float32 in and out, with the weight as int8 per output row and activations quantised on the fly.

    The operator has one activation scale for all rows of a call. So every row is brought to a largest magnitude of 1 first,
    and one more row of ±1 keeps the scale where it is: a row's result then does not depend on its neighbours, and a seeded
    request drafts the same alone and among others.
    """
    weight = weight.float()
    scales = (weight.abs().amax(dim=1) / 127.0).clamp(min=1e-12).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces the move of these operators to another package
        zeros = torch.zeros(len(scales), dtype=torch.int64)
        packed = torch.ops.quantized.linear_prepack(
            torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8), None
        )
    operator = torch.ops.quantized.linear_dynamic

    pin = torch.zeros(1, weight.shape[1])
    pin[0, :2] = torch.tensor([1.0, -1.0])

    def apply(x: Tensor) -> Tensor:
        largest = x.abs().amax(dim=-1, keepdim=True).clamp_(min=1e-12)
        return operator(torch.cat([x / largest, pin]), packed, reduce_range=True)[:-1].mul_(largest)

    return apply


def has_int8() -> bool:
    """Whether `int8_linear` runs on this CPU."""
    if not why_no_kernels():
        return True
    try:
        torch_int8_linear(torch.ones(8, 8))(torch.ones(1, 8))
    except (RuntimeError, AttributeError):
        return False
    return True
