"""Matrices that are stored in few bits, multiplied as they are: GGUF's blocks of 32 weights.

Nothing is quantised here. A matrix is taken only if its numbers are *exactly* blocks of 4 bits with a scale and an offset
(Q4_1) or of 8 bits with a scale (Q8_0), as those of the embedded verifier are. Scales, offsets and activations are then
rounded to bfloat16 for the product and everything is added up in float32, so the law is about as near to float32's as
that of a bfloat16 model, for a quarter of its memory traffic, which is what a token costs on a CPU. A row's result does
not depend on the rows beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdiff_dist.errors import InvalidConfig
from specdiff_dist.verifiers.packed_linear import Linear

BLOCK = 32
_ROWS = 32  # the packed layout comes in groups of so many output rows


def has_block_product(device: torch.device) -> bool:
    """Whether this build of torch multiplies 4-bit blocks fast on `device`: x86 with AVX2 or more."""
    has_operators = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
    return device.type == "cpu" and has_operators and torch.backends.cpu.get_cpu_capability().startswith("AVX")


def is_in_blocks(weight: Tensor) -> bool:
    """Whether `block_linear` takes this matrix."""
    return _nibbles(weight) is not None or _bytes(weight) is not None


def block_linear(weight: Tensor) -> Linear:
    """As `make_linear`, float32 in and out. weight: float32 [out, in] on a CPU. Raises InvalidConfig unless it is exactly
    4-bit or 8-bit blocks."""
    if (nibbles := _nibbles(weight)) is not None:
        values, scales, offsets = nibbles
        product = _packed(values, scales, offsets + 8 * scales, len(weight))
        return lambda x: product(x.bfloat16()).float()
    if (whole := _bytes(weight)) is None:
        raise InvalidConfig("int4 runs weights that are stored in 4-bit blocks (GGUF Q4_1); use bfloat16 for others")
    values, scales = whole
    high = torch.div(values, 16, rounding_mode="floor")  # -8 … 7: two products of 4 bits make one of 8
    upper = _packed(high + 8, 16 * scales, torch.zeros_like(scales), len(weight))
    lower = _packed(values - 16 * high, scales, 8 * scales, len(weight))

    def apply(x: Tensor) -> Tensor:
        half = x.bfloat16()
        return upper(half).float() + lower(half)

    return apply


def _packed(values: Tensor, scales: Tensor, zeros: Tensor, num_rows: int) -> Linear:
    """bfloat16 x -> x @ ((values - 8) · scale + zero).T. values: [out, in], 0 … 15; scales, zeros: [out, in / 32]."""
    missing = -num_rows % _ROWS
    values, scales, zeros = (torch.nn.functional.pad(one, (0, 0, 0, missing)) for one in (values, scales, zeros))
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.to(torch.int32), 2)
    scales_and_zeros = torch.stack([scales, zeros], dim=-1).transpose(0, 1).contiguous().bfloat16()
    operator = torch.ops.aten._weight_int4pack_mm_for_cpu
    if not missing:
        return lambda x: operator(x, packed, BLOCK, scales_and_zeros)
    return lambda x: operator(x, packed, BLOCK, scales_and_zeros)[:, :num_rows]


def _nibbles(weight: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """values [out, in], scales and offsets [out, in / 32] with weight = values · scale + offset exactly; None if there are
    none. Q4_1 makes the smallest of a block 0 and the largest 15."""
    if weight.shape[1] % BLOCK:
        return None
    blocks = weight.view(len(weight), -1, BLOCK)
    offsets = blocks.amin(-1)
    scales = ((blocks.amax(-1) - offsets) / 15).half().float()
    values = ((blocks - offsets[..., None]) / scales.clamp(min=1e-12)[..., None]).round_().clamp_(0, 15)
    if not torch.equal(values * scales[..., None] + offsets[..., None], blocks):
        return None
    return values.view(weight.shape), scales, offsets


def _bytes(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """values [out, in] in -127 … 127 and scales [out, in / 32] with weight = values · scale exactly; None if there are none."""
    if weight.shape[1] % BLOCK:
        return None
    blocks = weight.view(len(weight), -1, BLOCK)
    scales = (blocks.abs().amax(-1) / 127).half().float()
    values = (blocks / scales.clamp(min=1e-12)[..., None]).round_().clamp_(-127, 127)
    if not torch.equal(values * scales[..., None], blocks):
        return None
    return values.view(weight.shape), scales
