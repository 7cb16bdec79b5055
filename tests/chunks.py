"""What tests read out of an answer's chunks."""

from __future__ import annotations

from collections.abc import Sequence

from specdiff_dist.types import TokenChunk


def tokens_of(chunks: Sequence[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]
