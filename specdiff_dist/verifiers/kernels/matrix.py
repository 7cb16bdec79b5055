"""Matrices in blocks of 32 weights that share a scale: GGUF's Q4_1 (4 bits, scale and offset) and Q8_0 (8 bits, scale).

A verifier's matrix is taken only if its numbers are *exactly* such blocks, as those of the embedded verifier are: nothing
is quantised, and the product is float32's up to the order of its sums. A drafter's matrices are brought to the nearest
8-bit blocks: a drafter's law is its own.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from specdiff_dist.errors import InvalidConfig
from specdiff_dist.verifiers.kernels.build import library

BLOCK = 32
TILE = 32  # outputs that lie together in memory
Blocks = tuple[Tensor, Tensor, Tensor | None]  # values [out, in], scales and (4 bits) offsets [out, in / 32]


class MatrixStruct(ctypes.Structure):
    """`Matrix` of block_layers.cpp."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("inputs", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("bits", ctypes.c_int32),
    )


class BlockMatrix:
    """A Linear, float32 [n, in] -> [n, out], on a CPU. A row's result does not depend on the rows beside it."""

    def __init__(self, blocks: Blocks) -> None:
        """See `exact` and `nearest`."""
        values, scales, offsets = blocks
        self._num_outputs = len(values)
        missing = -len(values) % TILE
        values, scales = (torch.nn.functional.pad(one, (0, 0, 0, missing)) for one in (values, scales))
        if offsets is not None:
            offsets = torch.nn.functional.pad(offsets, (0, 0, 0, missing))
        bits = 8 if offsets is None else 4
        self._data = _packed(values, [scales] if offsets is None else [scales, offsets], bits)
        self.struct = MatrixStruct(self._data.data_ptr(), values.shape[1], len(values), bits)
        self._product = library().block_linear

    @staticmethod
    def exact(weight: Tensor) -> BlockMatrix:
        """The matrix itself. weight: float32 [out, in]. Raises InvalidConfig unless it is made of such blocks."""
        blocks = _nibbles(weight) or _bytes(weight)
        if blocks is None:
            raise InvalidConfig(
                "int4 runs weights that are stored in 4-bit blocks (GGUF Q4_1); use bfloat16 for others"
            )
        return BlockMatrix(blocks)

    @staticmethod
    def nearest(weight: Tensor) -> BlockMatrix:
        """The nearest matrix of 8-bit blocks. weight: float [out, in]. Raises InvalidConfig unless 32 divides `in`."""
        if weight.shape[1] % BLOCK:
            raise InvalidConfig(f"8-bit blocks need rows of a multiple of {BLOCK} numbers, not {weight.shape[1]}")
        return BlockMatrix((*_rounded_bytes(weight.float()), None))

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        struct = self.struct
        out = torch.empty(len(x), struct.outputs)
        scratch = torch.empty(len(x), struct.inputs + struct.inputs // BLOCK)
        self._product(
            ctypes.byref(struct), ctypes.c_void_p(x.data_ptr()), len(x), ctypes.c_void_p(out.data_ptr()),
            ctypes.c_void_p(scratch.data_ptr()), torch.get_num_threads(),
        )  # fmt: skip
        return out if struct.outputs == self._num_outputs else out[:, : self._num_outputs]


def is_in_blocks(weight: Tensor) -> bool:
    """Whether `BlockMatrix.exact` takes this matrix."""
    return _nibbles(weight) is not None or _bytes(weight) is not None


def _packed(values: Tensor, factors: list[Tensor], bits: int) -> Tensor:
    """uint8, the layout that block_layers.cpp tells. values: [out, in]; factors: [out, in / 32] each, float16's numbers."""
    num_outputs, num_inputs = values.shape
    tiles, blocks, per_word = num_outputs // TILE, num_inputs // BLOCK, 32 // bits
    digits = (values.to(torch.int64) & (2**bits - 1)).view(tiles, TILE, blocks, BLOCK // per_word, per_word)
    words = (digits << (bits * torch.arange(per_word))).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).permute(0, 2, 3, 1)
    halves = [one.half().view(tiles, TILE, blocks).permute(0, 2, 1) for one in factors]
    parts = [part.contiguous().view(tiles, blocks, -1).view(torch.uint8) for part in (words, *halves)]
    return torch.cat(parts, dim=-1).contiguous()


def _nibbles(weight: Tensor) -> Blocks | None:
    """values 0 … 15 with weight = values · scale + offset exactly; None if there are none. Q4_1 makes the smallest of a
    block 0 and the largest 15."""
    if weight.shape[1] % BLOCK:
        return None
    blocks = weight.view(len(weight), -1, BLOCK)
    offsets = blocks.amin(-1)
    scales = ((blocks.amax(-1) - offsets) / 15).half().float()
    values = ((blocks - offsets[..., None]) / scales.clamp(min=1e-12)[..., None]).round_().clamp_(0, 15)
    is_exact = torch.equal(values * scales[..., None] + offsets[..., None], blocks)
    if not is_exact or not torch.equal(offsets.half().float(), offsets):
        return None
    return values.view(weight.shape), scales, offsets


def _bytes(weight: Tensor) -> Blocks | None:
    """values -127 … 127 with weight = values · scale exactly; None if there are none."""
    if weight.shape[1] % BLOCK:
        return None
    values, scales = _rounded_bytes(weight)
    if not torch.equal(values.view(len(weight), -1, BLOCK) * scales[..., None], weight.view(len(weight), -1, BLOCK)):
        return None
    return values, scales, None


def _rounded_bytes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """values -127 … 127 and scales of the nearest 8-bit blocks."""
    blocks = weight.view(len(weight), -1, BLOCK)
    scales = (blocks.abs().amax(-1) / 127).half().float()
    values = (blocks / scales.clamp(min=1e-12)[..., None]).round_().clamp_(-127, 127)
    return values.view(weight.shape), scales
