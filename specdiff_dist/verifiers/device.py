"""Where a model lives, and in what numbers."""

from __future__ import annotations

import torch

from specdiff_dist.errors import InvalidConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # of verifiers


def pick_dtype(dtype: str) -> torch.dtype:
    """`auto` is bfloat16. Raises InvalidConfig on a dtype that verifiers do not have."""
    if dtype != "auto" and dtype not in DTYPES:
        raise InvalidConfig(f"verifier dtype must be auto, {' or '.join(DTYPES)}, not {dtype!r}")
    return DTYPES.get(dtype, torch.bfloat16)


def pick_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises InvalidConfig on a device that torch cannot name or find."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        named = torch.device(device)
    except RuntimeError as error:
        raise InvalidConfig(f"unknown device {device!r}: {error}") from error
    if named.type == "cuda" and (named.index or 0) >= torch.cuda.device_count():
        raise InvalidConfig(f"no device {device!r} here ({torch.cuda.device_count()} CUDA devices); use cpu or auto")
    return named
