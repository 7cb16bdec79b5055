"""What a draft network is trained for.

At a block position let p be the verifier's law and q the drafter's. A sampled draft token is accepted with probability
Σ min(p, q) = 1 - TV(p, q), and a block position only counts if all before it were accepted, so that the expected number of
accepted tokens is Σ_j Π_{i≤j} (1 - TV_i). Greedy decoding instead wants the same most probable token.

The verifier's laws are kept as their 32 most probable tokens. What lies outside them, or outside the drafter's vocabulary, is
no aim: KL is taken from p renormalised over what is left; TV is the true one, counting that mass as lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdiff_dist.errors import InvalidConfig
from specdiff_dist.train.blocks import BlockBatch, Targets

WEIGHTINGS = ("decay", "length")


@dataclass(frozen=True, slots=True)
class LossOptions:
    """Shares of the three terms and how block positions are weighted.

    kl: KL(verifier ‖ draft); tv: total variation; cross_entropy: to the verifier's most probable token.
    weighting: `decay` is exp(-slot / decay); `length` is the derivative of the block's expected number of accepted tokens with
        respect to the position's acceptance probability, as it stands.
    """

    kl: float = 0.7
    tv: float = 0.0
    cross_entropy: float = 0.3
    weighting: str = "decay"
    decay: float = 4.0

    def __post_init__(self) -> None:
        if self.weighting not in WEIGHTINGS:
            raise InvalidConfig(f"weighting must be {' or '.join(WEIGHTINGS)}, not {self.weighting!r}")
        if min(self.kl, self.tv, self.cross_entropy) < 0 or self.kl + self.tv + self.cross_entropy <= 0:
            raise InvalidConfig("loss shares kl, tv and cross_entropy must be ≥ 0 and not all 0")
        if self.decay <= 0:
            raise InvalidConfig(f"decay must be positive, not {self.decay}")


@dataclass(frozen=True, slots=True, eq=False)
class Distances:
    """Between the two laws at each wanted position; float32 [P], differentiable."""

    kl: Tensor
    overlap: Tensor  # Σ min(p, q), the acceptance probability of a sampled draft token
    cross_entropy: Tensor  # 0 where the drafter lacks the token


def distances(logits: Tensor, targets: Targets) -> Distances:
    """logits: [P, Vd]. Whole rows are touched only by one logsumexp and its backward pass."""
    logits = logits.float()
    log_total = torch.logsumexp(logits, dim=-1)
    log_q = logits.gather(1, targets.columns) - log_total[:, None]
    probs = targets.probs
    mass = probs.sum(dim=-1, keepdim=True)
    aim = probs / mass.clamp(min=1e-9)
    kl = torch.where(aim > 0, aim * (aim.clamp(min=1e-30).log() - log_q), 0.0).sum(dim=-1)
    overlap = torch.minimum(probs, log_q.exp()).sum(dim=-1)
    top = targets.top_column
    own = logits.gather(1, top.clamp(min=0)[:, None])[:, 0]
    return Distances(kl, overlap, torch.where(top >= 0, log_total - own, 0.0))


def block_loss(logits: Tensor, batch: BlockBatch, options: LossOptions) -> tuple[Tensor, dict[str, float]]:
    """(weighted mean over the wanted positions, its terms as plain numbers for the log)."""
    found = distances(logits, batch.targets)
    if options.weighting == "decay":
        weights = torch.exp(-batch.slots / options.decay)
    else:
        weights = _length_weights(found.overlap.detach(), batch)
    weights = weights / weights.sum()
    terms = {
        "kl": (weights * found.kl).sum(),
        "tv": (weights * (1.0 - found.overlap)).sum(),
        "cross_entropy": (weights * found.cross_entropy).sum(),
    }
    loss = options.kl * terms["kl"] + options.tv * terms["tv"] + options.cross_entropy * terms["cross_entropy"]
    return loss, {name: float(value.detach()) for name, value in terms.items()}


def _length_weights(overlap: Tensor, batch: BlockBatch) -> Tensor:
    """∂E/∂a_i for E = Σ_j Π_{k≤j} a_k, the product over the block's wanted positions (the others are given)."""
    size = batch.block_size
    grid = torch.ones(batch.block_ids.shape, device=overlap.device).flatten()
    grid[batch.wanted] = overlap
    is_wanted = torch.zeros_like(grid, dtype=torch.bool)
    is_wanted[batch.wanted] = True
    grid, is_wanted = grid.view(-1, size), is_wanted.view(-1, size)
    reached = torch.cumprod(torch.cat([torch.ones_like(grid[:, :1]), grid[:, :-1]], dim=1), dim=1)
    later = torch.zeros_like(grid)  # tokens expected after this one if it is accepted, itself included
    following = torch.zeros_like(grid[:, 0])
    for slot in reversed(range(size)):
        later[:, slot] = is_wanted[:, slot] + following
        following = torch.where(is_wanted[:, slot], grid[:, slot] * later[:, slot], following)
    return (reached * later).flatten()[batch.wanted]
