"""Matrices of the draft model in 8 bits (in floating point: verifiers/packed_linear.py)."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from specdiff_dist.verifiers.packed_linear import Linear


def int8_linear(weight: Tensor) -> Linear:
    """As `make_linear`, float32 in and out, with the weight as int8 per output row and activations quantised on the fly
    (CPU only; a quarter of the memory traffic, which is what a draft step costs).

    The activation scale is shared by the rows of one call, so a row's result depends a little on the others. That is
    fine for proposals, which are recorded as drawn, and is why verifiers do not use it.
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

    def apply(x: Tensor) -> Tensor:
        return operator(x, packed, reduce_range=True)

    return apply


def has_int8() -> bool:
    """Whether this build of torch runs `int8_linear` on this CPU."""
    try:
        int8_linear(torch.ones(8, 8))(torch.ones(1, 8))
    except (RuntimeError, AttributeError):
        return False
    return True
