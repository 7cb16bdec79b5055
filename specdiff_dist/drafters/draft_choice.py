"""What copying and what the diffusion drafter are worth in one session, learned from its own committed tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdiff_dist.core.features import FeatureRows
from specdiff_dist.core.rows import FloatArray, IntArray

LONGEST_MATCH = 8  # tokens; longer matches count as this long
PRIOR_STRENGTH = 4.0  # observations that the rates to begin with are worth
DECAY = 0.98  # per observation of a kind: a text changes
LOOKUP_RATES = (0.23, 0.50, 0.55, 0.63, 0.66, 0.70, 0.76, 0.86)
"""By match length, 1 … LONGEST_MATCH: how often the token copied is the one that comes. To begin with; counted in 133 answers
(21,689 tokens) of SmolLM2-135M-Instruct to training prompts."""
DIFFUSION_RATES = (0.5, 0.4, 0.35, 0.3)
"""By draft position, the last for all further ones: acceptance given reached. To begin with."""
DRAFT_COST, TOKEN_COST = 0.2, 0.05
"""A diffusion draft, and each drafted token verified, over a verification of one token; looking up costs nothing. Numbers of
the setting and not times measured, so that a seed fixes the text. These are of a verifier that is limited by memory."""
BLOCK_DRAFT_COST, BLOCK_TOKEN_COST = (
    0.4,
    0.22,
)  # the same where our CPU kernels run the verifier: one token costs so little
TRY_EVERY = 16  # rounds without any draft before the diffusion drafter is tried again
COPY, DIFFUSION, NOTHING = "copy", "diffusion", "nothing"


class Rates:
    """Success rates by kind, each shrunk towards the rate it began with."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._prior = np.asarray(prior, np.float64)
        self._tried, self._hit = np.zeros(len(self._prior)), np.zeros(len(self._prior))

    def observe(self, kind: int, is_hit: bool) -> None:
        kind = min(kind, len(self._prior) - 1)
        self._tried[kind] = DECAY * self._tried[kind] + 1.0
        self._hit[kind] = DECAY * self._hit[kind] + is_hit

    def of(self, first: int, count: int) -> FloatArray:
        """Rates of `count` kinds from `first` on; beyond the last one it stays the last. [count]"""
        kinds = np.minimum(first + np.arange(count), len(self._prior) - 1)
        return (self._hit[kinds] + PRIOR_STRENGTH * self._prior[kinds]) / (self._tried[kinds] + PRIOR_STRENGTH)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest n-gram (at most LONGEST_MATCH) that ends a text and occurs in it before, most recently.

    `size` 0: there is none. `at` is where its continuation begins.
    """

    size: int
    at: int


def find_match(token_ids: IntArray) -> Match:
    """token_ids: [t ≥ 1]."""
    ends = np.flatnonzero(token_ids[:-1] == token_ids[-1])  # of earlier occurrences
    if not len(ends):
        return Match(0, len(token_ids))
    size = 1
    while size < LONGEST_MATCH:
        longer = ends[ends >= size]
        longer = longer[token_ids[longer - size] == token_ids[-1 - size]]
        if not len(longer):
            break
        ends, size = longer, size + 1
    return Match(size, int(ends[-1]) + 1)


def copied(token_ids: IntArray, match: Match, num_tokens: int) -> IntArray:
    """What followed the match; where the copy reaches the end of the text it goes on with what it has copied."""
    return np.resize(token_ids[match.at :], num_tokens).astype(np.int32)


class DraftChoice:
    """One session's choices and what it has learned: COPY, DIFFUSION, or NOTHING where neither is worth its cost.

    Lookups are judged at every committed token, whoever drafted it: what would have been copied is known for nothing.
    A copy that has been right so far is a match one token longer, so a rate by match length tells the whole block's.
    The diffusion drafter is judged by its own past blocks. The prompt teaches nothing: it is another's text.
    """

    def __init__(
        self,
        diffusion_rates: Sequence[float] = DIFFUSION_RATES,
        draft_cost: float = DRAFT_COST,
        token_cost: float = TOKEN_COST,
        feature_size: int = 0,
    ) -> None:
        self.diffusion_cached = 0  # committed tokens in the diffusion drafter's cache
        self.features = FeatureRows(feature_size)  # of the committed tokens but the anchor, if that drafter needs them
        self._lookup, self._diffusion = Rates(LOOKUP_RATES), Rates(diffusion_rates)
        self._draft_cost, self._token_cost = draft_cost, token_cost
        self._num_nothing = 0  # rounds in a row
        self._num_seen = 0  # committed tokens learned from, or of the prompt
        self._block: tuple[int, IntArray] | None = None  # the last diffusion block, and the position it begins at
        self._chosen: tuple[int, str] | None = None  # of the round with so many committed tokens

    def learn(self, committed: IntArray) -> None:
        """Looks at the tokens committed since the last call; the first call's are the prompt. Repeats teach nothing."""
        start, self._num_seen = self._num_seen or len(committed), max(self._num_seen, len(committed))
        for length in range(start, len(committed)):
            match = find_match(committed[:length])
            if match.size:
                self._lookup.observe(match.size - 1, bool(committed[match.at] == committed[length]))
        if self._block is not None and self._block[0] < len(committed):
            begin, drafted = self._block
            self._block = None
            for position, (token, came) in enumerate(zip(drafted, committed[begin:], strict=False)):
                self._diffusion.observe(position, bool(token == came))
                if token != came:
                    break

    def of_round(self, committed: IntArray, num_tokens: int, *, copies_only: bool = False) -> str:
        """What this round does: decided once, before it has drafted anything, from `committed` and what past rounds taught."""
        if self._chosen is None or self._chosen[0] != len(committed):
            choice = self._choose(find_match(committed), num_tokens, copies_only=copies_only)
            if choice == NOTHING and self._num_nothing >= TRY_EVERY - 1 and not copies_only:
                choice = DIFFUSION
            self._num_nothing = self._num_nothing + 1 if choice == NOTHING else 0
            self._chosen = len(committed), choice
        return self._chosen[1]

    def lookup_rates(self, match: Match, num_tokens: int) -> FloatArray:
        """Acceptance of each copied token given that it is reached."""
        return self._lookup.of(match.size - 1, num_tokens)

    def drafted(self, committed: IntArray, drafted_before: IntArray, token_ids: IntArray) -> None:
        """Notes the diffusion drafter's block of this round, to be judged when its tokens are known."""
        self._block = len(committed), np.concatenate([drafted_before, token_ids])

    def _choose(self, match: Match, num_tokens: int, *, copies_only: bool) -> str:
        """The largest expected gain, a token accepted being worth a verification; verified is the length that is best."""
        drafts = 0.0 if copies_only else self._gain(self._diffusion.of(0, num_tokens)) - self._draft_cost
        copies = self._gain(self.lookup_rates(match, num_tokens)) if match.size else 0.0
        if max(drafts, copies) <= 0.0:
            return NOTHING
        return COPY if copies >= drafts else DIFFUSION

    def _gain(self, rates: FloatArray) -> float:
        return float(np.cumsum(np.cumprod(rates) - self._token_cost).max())
