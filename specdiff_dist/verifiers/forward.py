"""The seam between a verifier's sessions and its model: one forward over what several calls add to their caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from specdiff_dist.core.rows import IntArray, SparseRows
from specdiff_dist.types import SamplingParams

CacheT = TypeVar("CacheT")


@dataclass(frozen=True, slots=True, eq=False)
class ForwardPart(Generic[CacheT]):
    """What one call adds in a forward. No two parts of a forward have the same cache."""

    cache: CacheT
    token_ids: IntArray  # [t ≥ 1], appended to the cache
    num_logits: int  # 0 … t: wanted after so many of the last tokens
    feature_layers: tuple[int, ...] = ()  # ascending
    sampling: SamplingParams | None = None  # where the logits are only wanted for rows that narrow_rows.py makes

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Forwarded:
    """What a part gets: float32 [num_logits, V], and [t, F · H], the outputs of its feature layers side by side."""

    logits: Tensor
    features: Tensor | None  # None without feature layers
    rows: SparseRows | None = None  # made of the logits; None where they are to be looked at by the call itself


class ModelForward(Protocol[CacheT]):
    """What a verifier model must be able to do. Not thread-safe."""

    vocab_size: int  # of the real vocabulary: ids ≥ this never occur
    max_model_len: int
    dtype: str
    device_type: str  # "cpu", "cuda", …
    num_layers: int  # whose hidden states it gives; 0: none
    hidden_size: int
    kv_bytes_per_token: int

    def new_cache(self) -> CacheT: ...

    def crop(self, cache: CacheT, length: int) -> None:
        """Cuts the cache to its first `length` tokens."""
        ...

    def copy_cache(self, cache: CacheT, length: int) -> CacheT:
        """Its first `length` tokens as a cache of their own."""
        ...

    def forward_parts(self, parts: Sequence[ForwardPart[CacheT]]) -> list[Forwarded]:
        """Runs all parts at once. The caches are unusable if this raises."""
        ...


def forward_one(
    model: ModelForward[CacheT],
    cache: CacheT,
    token_ids: IntArray,
    num_logits: int,
    feature_layers: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor | None]:
    """A forward of one part: its logits and features."""
    (only,) = model.forward_parts([ForwardPart(cache, token_ids, num_logits, feature_layers)])
    return only.logits, only.features
