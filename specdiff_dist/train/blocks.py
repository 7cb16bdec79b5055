"""One training step's input: prefixes of some answers and, after each, masked blocks with the verifier's laws for them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """What the verifier says about the P wanted block positions, as columns of the drafter's output."""

    columns: Tensor  # int64 [P, 32]: its most probable tokens, most probable first; 0 where the drafter lacks the token
    probs: Tensor  # float32 [P, 32]: their probabilities at temperature 1; 0 where the drafter lacks the token
    top_column: Tensor  # int64 [P]: its most probable token; -1 where the drafter lacks it
    drawn_column: Tensor  # int64 [P]: the token the answer goes on with; -1 where the drafter lacks it


@dataclass(frozen=True, slots=True, eq=False)
class BlockBatch:
    """S answers, packed without padding: prefixes behind one another, then all blocks, each answer's own together."""

    prefix_ids: Tensor  # int64 [C]
    prefix_splits: tuple[int, ...]  # [S + 1]
    block_ids: Tensor  # int64 [N, B]: anchor, then tokens or MASK_ID
    anchors: Tensor  # int64 [N]: the anchor's position in its answer; a block sees the prefix before it
    block_splits: tuple[int, ...]  # [S + 1]
    wanted: Tensor  # int64 [P], ascending: indices into N · B of the positions whose outputs are trained
    targets: Targets
    prefix_features: Tensor | None = None  # float16 [C, F · H], for networks that need the verifier's

    @property
    def block_size(self) -> int:
        return self.block_ids.shape[1]

    @property
    def slots(self) -> Tensor:
        """int64 [P]: where in its block a wanted position stands, from 0."""
        return self.wanted % self.block_size

    def to(self, device: torch.device) -> BlockBatch:
        if device.type == "cpu":
            return self
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("prefix_ids", "block_ids", "anchors", "wanted")
        }
        targets = Targets(*(getattr(self.targets, name).to(device) for name in Targets.__slots__))
        features = self.prefix_features
        return replace(
            self, **moved, targets=targets, prefix_features=None if features is None else features.to(device)
        )
