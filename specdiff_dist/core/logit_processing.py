"""What a request asks to be done to the target's logits before temperature and truncation: part of the target's law.

In this order, as vLLM does it: tokens not allowed are forbidden; tokens that would end the answer are forbidden until
`min_tokens` are generated; biases are added; then, with o the times a token occurs in the output before the position:

    repetition   logit / r if positive, else logit · r, where the token occurs in the prompt or the output
    frequency    logit - frequency_penalty · o
    presence     logit - presence_penalty · [o > 0]

At a verify position the output before it is the committed one *and* the draft tokens before it in the block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specdiff_dist.core.rows import FloatArray, IntArray
from specdiff_dist.errors import InvalidRequest

MAX_PENALTY = 2.0  # frequency and presence, either sign
MAX_REPETITION_PENALTY = 1e6  # or its inverse: float32 logits stay finite
MAX_BIAS = 100.0


@dataclass(frozen=True, slots=True)
class LogitProcessing:
    """The parameters; what is left at its default does nothing. Raises InvalidRequest on values out of range."""

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias_token_ids: tuple[int, ...] = ()  # each at most once
    biases: tuple[float, ...] = ()  # one per id
    min_tokens: int = 0  # generated before the answer may end
    allowed_token_ids: tuple[int, ...] = ()  # (): all

    def __post_init__(self) -> None:
        for name in ("frequency_penalty", "presence_penalty"):
            if not -MAX_PENALTY <= getattr(self, name) <= MAX_PENALTY:  # false for NaN
                raise InvalidRequest(
                    f"{name} must be between -{MAX_PENALTY:g} and {MAX_PENALTY:g}, not {getattr(self, name)}",
                    param=name,
                )
        if not 1.0 / MAX_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY:
            raise InvalidRequest(
                f"repetition_penalty must be positive, within {1.0 / MAX_REPETITION_PENALTY:g} … "
                f"{MAX_REPETITION_PENALTY:g}, not {self.repetition_penalty}",
                param="repetition_penalty",
            )
        if len(self.biases) != len(self.bias_token_ids) or len(set(self.bias_token_ids)) != len(self.bias_token_ids):
            raise InvalidRequest("logit_bias needs one bias for each of its tokens", param="logit_bias")
        if not all(-MAX_BIAS <= bias <= MAX_BIAS for bias in self.biases):
            raise InvalidRequest(f"logit_bias must be between -{MAX_BIAS:g} and {MAX_BIAS:g}", param="logit_bias")
        if self.min_tokens < 0:
            raise InvalidRequest(f"min_tokens must not be negative, not {self.min_tokens}", param="min_tokens")

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def forbids_tokens(self) -> bool:
        """Whether some token has probability 0 by the request's word: no rule may let a draft through there."""
        return self.min_tokens > 0 or bool(self.allowed_token_ids)

    def after(self, num_generated: int) -> LogitProcessing | None:
        """What is still to be done once `num_generated` tokens are there; None: nothing."""
        left = self if num_generated < self.min_tokens else replace(self, min_tokens=0)
        return None if left == NOTHING else left

    def check_ids(self, vocab_size: int, ending_token_ids: tuple[int, ...] = ()) -> None:
        """Raises InvalidRequest for ids outside the vocabulary, and when no token would be left to generate.

        Args:
            ending_token_ids: forbidden before `min_tokens`.
        """
        for ids, name in ((self.bias_token_ids, "logit_bias"), (self.allowed_token_ids, "allowed_token_ids")):
            if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
                raise InvalidRequest(f"{name}: token ids must be in [0, {vocab_size})", param=name)
        if self.min_tokens == 0:
            return
        ending = set(ending_token_ids)
        if ending.issuperset(self.allowed_token_ids) if self.allowed_token_ids else len(ending) >= vocab_size:
            raise InvalidRequest("min_tokens leaves no token: all that are allowed end the answer", param="min_tokens")


NOTHING = LogitProcessing()


@dataclass(frozen=True, slots=True, eq=False)
class Occurrences:
    """How often tokens occur before each of n positions, for the u tokens that occur at all."""

    token_ids: NDArray[np.int64]  # [u] ascending
    in_output: FloatArray  # [n, u]
    in_prompt: NDArray[np.bool_]  # [u]


def count_occurrences(token_ids: IntArray, num_prompt: int, num_positions: int) -> Occurrences:
    """Occurrences before each of `num_positions` ≥ 1 positions in a row.

    Args:
        token_ids: prompt, output and draft: everything before the last of the positions.
        num_prompt: how many of them are the prompt's; at most those before the first position.
    """
    unique, at = np.unique(token_ids, return_inverse=True)
    start = len(token_ids) - num_positions + 1  # tokens before the first position
    counts = np.zeros((num_positions, len(unique)))
    counts[0] = np.bincount(at[num_prompt:start], minlength=len(unique))
    counts[np.arange(1, num_positions), at[start:]] = 1.0
    in_prompt = np.bincount(at[:num_prompt], minlength=len(unique)) > 0
    return Occurrences(unique.astype(np.int64), np.cumsum(counts, axis=0), in_prompt)
