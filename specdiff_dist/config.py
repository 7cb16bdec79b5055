"""The dials of one request, and the table that turns a quality tier into them.

Leniency is 0 for exact and larger for looser, for every rule. Dataclasses are frozen and check themselves: a value that
exists is valid (InvalidConfig otherwise).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from specdiff_dist.core.rules import Lenience, Linear, Lossless, Rule
from specdiff_dist.core.speculation import ConfidenceThreshold, MeasuredLibraSpec, Off, Policy, Static
from specdiff_dist.errors import InvalidConfig

REVEAL_ORDERS = ("left_to_right", "max_prob", "token_prob", "entropy")
EARLY_REVEALS = ("proposal", "one_hot")


@dataclass(frozen=True, slots=True)
class Effort:
    """Diffusion effort: how a block is denoised.

    num_denoising_steps: K forwards over the block; step s reveals ⌊n/K⌋ tokens, one more while s < n mod K.
    reveal_order: which masked positions a step reveals: the leftmost; those of largest max probability; those whose
        *sampled* token is most probable (LLaDA "low confidence" remasking); those of least entropy.
    early_reveal: what is reported for a token revealed before the last step: the `proposal` it was drawn from, or
        `one_hot` (the token treated as given: exact in any order, accepts less).
    """

    num_denoising_steps: int = 1
    reveal_order: str = "left_to_right"
    early_reveal: str = "proposal"

    def __post_init__(self) -> None:
        if not 1 <= self.num_denoising_steps <= 1024:
            raise InvalidConfig(f"num_denoising_steps must be 1 … 1024, not {self.num_denoising_steps}")
        if self.reveal_order not in REVEAL_ORDERS:
            raise InvalidConfig(f"reveal_order must be one of {', '.join(REVEAL_ORDERS)}, not {self.reveal_order!r}")
        if self.early_reveal not in EARLY_REVEALS:
            raise InvalidConfig(f"early_reveal must be one of {', '.join(EARLY_REVEALS)}, not {self.early_reveal!r}")


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Everything the round loop may vary for one request."""

    rule: Rule = field(default_factory=Lossless)
    effort: Effort = field(default_factory=Effort)
    policy: Policy = field(default_factory=lambda: Static(4))
    draft_temperature: float | None = None  # None: the request's own
    draft_top_k: int = 64  # proposals are truncated to this many tokens before sampling
    max_tv_per_token: float = math.inf  # hard bounds on deviation, whatever the rule: per token …
    tv_budget: float = math.inf  # … and in sum over the answer; once spent, decoding is exact
    draft_ahead: bool = False  # drafts the next round while this one is verified (engine/ahead.py)

    def __post_init__(self) -> None:
        if not 1 <= self.draft_top_k <= 4096:
            raise InvalidConfig(f"draft_top_k must be 1 … 4096, not {self.draft_top_k}")
        if self.draft_temperature is not None and not 0.0 <= self.draft_temperature <= 100.0:
            raise InvalidConfig(f"draft_temperature must be between 0 and 100, not {self.draft_temperature}")
        if not (self.max_tv_per_token >= 0.0 and self.tv_budget >= 0.0):  # false for NaN
            raise InvalidConfig("max_tv_per_token and tv_budget must be 0 or more")


DEFAULT_TIER = "exact"

# The whole dial, for the embedded pair; measured points will replace it. Lenience, because its law is nowhere more than
# 1/(1 - leniency) times the verifier's: nothing the verifier excludes is ever said, and at temperature 0 it is exact.
# The exact tier drafts as much as pays on the machine it runs on, which may be nothing.
TIERS: dict[str, DecodeConfig] = {
    "exact": DecodeConfig(Lossless(), Effort(1), MeasuredLibraSpec(block=8, max_length=16)),
    "high": DecodeConfig(Lenience(0.2), Effort(1), Static(4)),
    "balanced": DecodeConfig(Lenience(0.4), Effort(1), Static(4)),
    "fast": DecodeConfig(Lenience(0.6), Effort(1), ConfidenceThreshold(0.4, 6)),
    "turbo": DecodeConfig(Lenience(0.8), Effort(1), ConfidenceThreshold(0.4, 8)),
}

__all__ = [
    "DEFAULT_TIER", "EARLY_REVEALS", "REVEAL_ORDERS", "TIERS", "ConfidenceThreshold", "DecodeConfig", "Effort",
    "Lenience", "Linear", "Lossless", "Off", "Policy", "Rule", "Static",
]  # fmt: skip
