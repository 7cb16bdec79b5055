"""Our own CPU kernels: Llama's layers over matrices of 4-bit and 8-bit blocks (block_layers.cpp)."""

from specdiff_dist.verifiers.kernels.build import why_no_kernels
from specdiff_dist.verifiers.kernels.layers import BlockLayers, has_block_layers
from specdiff_dist.verifiers.kernels.matrix import BLOCK, BlockMatrix, is_in_blocks

__all__ = ["BLOCK", "BlockLayers", "BlockMatrix", "has_block_layers", "is_in_blocks", "why_no_kernels"]
