"""LlamaLayers run by block_layers.cpp: a forward is one call of it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdiff_dist.verifiers.kernels.build import library
from specdiff_dist.verifiers.kernels.matrix import BLOCK, BlockMatrix, MatrixStruct
from specdiff_dist.verifiers.llama_layers import Batch, LlamaLayers, LlamaShape, Span, Weights

MAX_HEAD = 256


class _ShapeStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("hidden", "inner", "heads", "kv_heads", "head_dim")),
        ("eps", ctypes.c_float),
    )


class _LayerStruct(ctypes.Structure):
    _fields_ = (
        ("input_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        *((name, MatrixStruct) for name in ("qkv", "attention_output", "gate_up", "down")),
    )


class _CacheStruct(ctypes.Structure):
    _fields_ = (("keys", ctypes.c_void_p), ("values", ctypes.c_void_p), ("capacity", ctypes.c_int64))


def has_block_layers(shape: LlamaShape) -> bool:
    """Whether a network of this shape can be run by the kernels."""
    sizes = (shape.hidden_size, shape.intermediate_size, shape.head_dim)
    return all(size % BLOCK == 0 for size in sizes) and shape.head_dim <= MAX_HEAD


class BlockLayers(LlamaLayers):
    """Float32 activations, matrices in blocks, on a CPU. The numbers are those of LlamaLayers up to the order of sums."""

    def __init__(self, shape: LlamaShape, weights: Weights, matrix: Callable[[Tensor], BlockMatrix]) -> None:
        """`matrix`: BlockMatrix.exact or .nearest. The shape must be one that `has_block_layers`. Raises ModelUnavailable,
        and what `matrix` raises."""
        super().__init__(shape, weights, matrix, dtype=torch.float32, device=torch.device("cpu"))
        self._kernels = library()
        self._struct = _ShapeStruct(
            shape.hidden_size, shape.intermediate_size, shape.num_attention_heads, shape.num_key_value_heads,
            shape.head_dim, shape.rms_norm_eps,
        )  # fmt: skip
        structs = [
            _LayerStruct(
                layer.input_norm.data_ptr(), layer.mlp_norm.data_ptr(),
                *(product.struct for product in (layer.qkv, layer.attention_output, layer.gate_up, layer.down)),
            )
            for layer in self._layers
        ]  # fmt: skip
        self._layer_structs = (_LayerStruct * len(structs))(*structs)

    def forward(
        self, batch: Batch, x: Tensor, *, wanted: Collection[int] = (), block_only: bool = False
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See LlamaLayers.forward. x is overwritten."""
        rows = np.concatenate([_rows_of(index, span) for index, span in enumerate(batch.spans)])
        longest = int(rows[:, 2].max())
        cos, sin = self.rotary(0, longest)
        kept = np.concatenate([np.r_[span.block] for span in batch.spans]).astype(np.int32) if block_only else None
        num_threads = torch.get_num_threads()
        needed = self._kernels.scratch_size(ctypes.byref(self._struct), len(rows), longest, num_threads)
        scratch = torch.empty(needed)
        hidden: dict[int, Tensor] = {}
        first, last = 0, len(self) - 1
        for index in sorted({*wanted, last}):
            is_last = block_only and index == last
            self._kernels.block_layers(
                ctypes.byref(self._struct), ctypes.byref(self._layer_structs[first]), index + 1 - first,
                self._caches(batch, first), rows.ctypes.data_as(ctypes.c_void_p), len(rows),
                kept.ctypes.data_as(ctypes.c_void_p) if is_last and kept is not None else None,
                len(kept) if is_last and kept is not None else 0,
                _address(cos), _address(sin), _address(x), _address(scratch), longest, num_threads,
            )  # fmt: skip
            first = index + 1
            if is_last and kept is not None:
                x = x[: len(kept)]
            if index in wanted:
                hidden[index] = x.clone()
        return x, hidden

    def _caches(self, batch: Batch, layer: int) -> ctypes.Array[_CacheStruct]:
        return (_CacheStruct * len(batch.spans))(
            *(
                _CacheStruct(
                    span.cache.keys[layer].data_ptr(), span.cache.values[layer].data_ptr(), span.cache.capacity
                )
                for span in batch.spans
            )
        )


def _rows_of(index: int, span: Span) -> NDArray[np.int32]:
    """`Row`s of block_layers.cpp, int32 [rows, 3]: the cache's number, the token's place, the first place out of sight."""
    places = np.arange(span.cache.length, span.end, dtype=np.int32)
    ends = places + 1
    ends[span.num_causal :] = span.end
    return np.stack([np.full_like(places, index), places, ends], axis=1)


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
