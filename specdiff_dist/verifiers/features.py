"""Hidden states as they travel, and back (core/features.py)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specdiff_dist.core.features import FeatureArray

_LARGEST = torch.finfo(torch.float16).max


def wire_features(hidden: Tensor) -> FeatureArray:
    """bfloat16 as its own bits; anything else as float16, cut at its largest number: a few channels of large models come
    near it, and a drafter normalises them anyway. NaN stays what it is and is refused where it arrives."""
    hidden = hidden.cpu()
    if hidden.dtype == torch.bfloat16:
        return hidden.contiguous().view(torch.int16).numpy().view(np.uint16)
    return hidden.clamp(-_LARGEST, _LARGEST).half().numpy()


def features_tensor(features: FeatureArray) -> Tensor:
    """The same numbers as a tensor: bfloat16 for uint16, else float16. Shares its memory where that is writable."""
    array = features if features.flags.writeable else features.copy()
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
