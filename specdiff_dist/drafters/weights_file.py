"""A drafter folder's weights: one safetensors file, matrices in floating point or in 8 bits.

An 8-bit matrix `name` is int8 [out, in] beside `name_scale`, float32 [out]: row i is name[i] · name_scale[i]. It is half the
size of bfloat16, and on a CPU, where the drafter computes in 8 bits anyway (linear.py), exactly what is computed with.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdiff_dist.errors import ModelUnavailable

_SCALE = "_scale"


def load_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of the one safetensors file in `folder`, 8-bit matrices as float32.

    Raises ModelUnavailable when there is no such file, it cannot be read, or an 8-bit matrix lacks its scales.
    """
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise ModelUnavailable(f"{folder} should hold one safetensors file, not {len(files)}")
    try:
        stored = load_file(files[0])
    except (OSError, SafetensorError) as error:
        raise ModelUnavailable(f"cannot read {files[0]}: {error}") from error
    return {
        name: _restored(name, tensor, stored) if tensor.dtype == torch.int8 else tensor
        for name, tensor in stored.items()
        if not name.endswith(_SCALE)
    }


def in_8_bits(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights with every matrix of floating point numbers in 8 bits; the rest as it is."""
    stored: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if tensor.dim() != 2 or not tensor.is_floating_point():
            stored[name] = tensor
            continue
        matrix = tensor.float()
        scales = (matrix.abs().amax(dim=1) / 127.0).clamp(min=1e-12)
        stored[name] = torch.round(matrix / scales[:, None]).to(torch.int8)
        stored[name + _SCALE] = scales
    return stored


def _restored(name: str, matrix: Tensor, stored: dict[str, Tensor]) -> Tensor:
    scales = stored.get(name + _SCALE)
    if matrix.dim() != 2 or scales is None or scales.shape != matrix.shape[:1]:
        raise ModelUnavailable(f"drafter weights: {name} is in 8 bits and lacks {name}{_SCALE}, one number per row")
    return matrix.float() * scales[:, None].float()
