"""Where a model lives."""

from __future__ import annotations

import torch

from specdiff_dist.errors import InvalidConfig


def pick_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises InvalidConfig on a device that torch cannot name."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise InvalidConfig(f"unknown device {device!r}: {error}") from error
