"""Verifier features for drafters that condition on them: what travels, and what one side keeps of it.

The features of a token are the verifier's hidden states after some of its layers once it has read the token, side by
side, [F · H]. They travel as float16, or as the bits of bfloat16 in uint16: half precision is what they are computed in,
and a drafter's proposals are recorded as drawn whatever they were computed from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specdiff_dist.errors import InvalidConfig

if TYPE_CHECKING:  # types.py uses core's arrays
    from specdiff_dist.types import DrafterInfo, VerifierInfo

FeatureArray = NDArray[np.float16 | np.uint16]  # [tokens, F · H]

MAX_FEATURE_BYTES = 16 << 20  # in one call or reply: a quarter of a message; longer stretches go in several calls
_BYTES = 2  # an element
_FLOAT16_EXPONENT, _BFLOAT16_EXPONENT = 0x7C00, 0x7F80  # all ones: NaN or infinite


def check_features(drafter: DrafterInfo | None, verifier: VerifierInfo) -> None:
    """Raises InvalidConfig, for people, when the verifier cannot give what the drafter needs."""
    if drafter is None or not drafter.feature_layers:
        return
    layers = ", ".join(map(str, drafter.feature_layers))
    if not verifier.num_layers:
        raise InvalidConfig(
            f"drafter {drafter.name!r} needs hidden states of verifier layers {layers}, and verifier {verifier.name!r} "
            "gives none; use a drafter without `feature_layers` in its config.json, or 'prompt-lookup' with any verifier"
        )
    size = len(drafter.feature_layers) * verifier.hidden_size
    if max(drafter.feature_layers) >= verifier.num_layers or size != drafter.feature_size:
        raise InvalidConfig(
            f"drafter {drafter.name!r} needs hidden states of verifier layers {layers}, {drafter.feature_size} numbers a "
            f"token, but verifier {verifier.name!r} has {verifier.num_layers} layers of {verifier.hidden_size}: it was "
            "trained for another verifier; train one for this, or use 'prompt-lookup'"
        )


def max_rows(size: int) -> int:
    """Tokens whose features of `size` numbers fit into one call or reply; at least 1."""
    return max(MAX_FEATURE_BYTES // (_BYTES * max(size, 1)), 1)


def fault(features: object, num_rows: int, size: int) -> str | None:
    """What is wrong with features that should be [num_rows, size], in words; None if nothing is."""
    if not isinstance(features, np.ndarray):
        return f"features are missing; [{num_rows}, {size}] were expected"
    if features.dtype not in (np.float16, np.uint16) or features.shape != (num_rows, size):
        return (
            f"features must be float16 or bfloat16 (as uint16) [{num_rows}, {size}], not {features.dtype} "
            f"{list(features.shape)}"
        )
    exponent = _FLOAT16_EXPONENT if features.dtype == np.float16 else _BFLOAT16_EXPONENT
    is_finite = (features.view(np.uint16) & exponent) != exponent  # four times as fast as asking for halves themselves
    return None if is_finite.all() else "features: NaN or infinite"


class FeatureRows:
    """The features of a text's first `length` tokens. What is there is kept: it never changes under a drafter that has
    cached something made from it."""

    def __init__(self, size: int) -> None:
        """size: F · H."""
        self.size, self.length = size, 0
        self._rows: FeatureArray = np.zeros((0, size), np.float16)

    def extend(self, features: FeatureArray) -> None:
        """Adds those of the tokens that follow. Another precision than the first ones' is converted to theirs."""
        if self.length == 0 and features.dtype != self._rows.dtype:
            self._rows = np.zeros((len(self._rows), self.size), features.dtype)
        end = self.length + len(features)
        if end > len(self._rows):
            grown = np.zeros((max(end, 2 * len(self._rows), 64), self.size), self._rows.dtype)
            grown[: self.length] = self._rows[: self.length]
            self._rows = grown
        self._rows[self.length : end] = _converted(features, self._rows.dtype)
        self.length = end

    def crop(self, length: int) -> None:
        """Forgets all but the first `length` tokens'."""
        self.length = min(self.length, length)

    def of(self, start: int, stop: int) -> FeatureArray:
        """Of the tokens start … stop - 1, all below `length`; a copy."""
        return self._rows[start:stop].copy()


def _converted(features: FeatureArray, dtype: np.dtype) -> FeatureArray:
    """A verifier that replaces a lost one may run in another precision."""
    if features.dtype == dtype:
        return features
    if dtype == np.uint16:
        bits = features.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    wide = (features.astype(np.uint32) << 16).view(np.float32)
    largest = np.finfo(np.float16).max
    return np.clip(wide, -largest, largest).astype(np.float16)
