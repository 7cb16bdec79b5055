"""Where a model lives."""

from __future__ import annotations

import torch

from specdiff_dist.errors import InvalidConfig


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
