"""The nouns that travel: calls to the roles, their replies, and what a request gets back.

All arrays are NumPy on the CPU; a reply's probabilities are float32 and mean "this row divided by its own mass".
Positions are absolute: the first prompt token is position 0. The *anchor* is the last committed token; it has no
verifier KV yet and is the last of `new_token_ids` in every call.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from specdiff_dist.config import DecodeConfig, Effort
from specdiff_dist.core.calibration import CalibrationTable
from specdiff_dist.core.features import FeatureArray
from specdiff_dist.core.logit_processing import LogitProcessing
from specdiff_dist.core.logprobs import MAX_LOGPROBS, TargetLogprobs, TokenLogprob
from specdiff_dist.core.rows import IntArray, SparseRows
from specdiff_dist.core.speculation import DraftStatistics
from specdiff_dist.errors import InvalidRequest

GREEDY_TEMPERATURE = 1e-5  # below it a request is greedy, as in vLLM
MAX_NARROW_SUPPORT = 256  # target rows with more entries stay where they were computed ("wide")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Defines the target law: softmax(logits / temperature), then min-p, then top-k, then top-p (ties at the k-th logit
    stay in). The logits are those that LogitProcessing leaves, where a request asks for it.

    Raises InvalidRequest on values out of range, NaN and infinities included.
    """

    temperature: float = 1.0  # < 1e-5 is greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0  # keeps tokens at least so probable, as a share of the most probable one's probability; 0: off

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:  # false for NaN
            raise InvalidRequest(f"temperature must be between 0 and 100, not {self.temperature}", param="temperature")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(f"top_p must be in (0, 1], not {self.top_p}", param="top_p")
        if self.top_k < 0:
            raise InvalidRequest(f"top_k must be 0 (off) or positive, not {self.top_k}", param="top_k")
        if not 0.0 <= self.min_p <= 1.0:
            raise InvalidRequest(f"min_p must be in [0, 1], not {self.min_p}", param="min_p")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def may_be_wide(self) -> bool:
        """Whether a target row can have more than MAX_NARROW_SUPPORT entries."""
        return not self.is_greedy and not 0 < self.top_k <= MAX_NARROW_SUPPORT


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request, tokenised. Raises InvalidRequest when it cannot be served."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    max_tokens: int
    stop: tuple[str, ...] = ()  # never part of the text returned
    stop_token_ids: tuple[int, ...] = ()  # beside the model's EOS ids
    ignore_eos: bool = False
    processing: LogitProcessing | None = None  # None: the logits are taken as they are
    num_logprobs: int | None = None  # most probable tokens reported beside each token's own logprob; None: no logprobs

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise InvalidRequest("the prompt is empty; send at least one token", param="prompt")
        if self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, not {self.max_tokens}", param="max_tokens")
        if any(text == "" for text in self.stop):
            raise InvalidRequest("a stop string is empty; leave it out instead", param="stop")
        if self.processing is not None and self.processing.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most max_tokens, {self.max_tokens}, not {self.processing.min_tokens}",
                param="min_tokens",
            )
        if self.num_logprobs is not None and not 0 <= self.num_logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(
                f"at most {MAX_LOGPROBS} logprobs per token, not {self.num_logprobs}", param="logprobs"
            )


@dataclass(frozen=True, slots=True)
class CallCost:
    """What one call took. The replica fills the first five, the transport the rest."""

    forward_s: float = 0.0  # the model's own time, all forwards of the call
    queue_s: float = 0.0  # waiting for the model
    num_forwards: int = 0
    batch_size: int = 1  # sessions that shared the forward
    batch_tokens: int = 0  # tokens of all of them in it; 0: not told
    wall_s: float = 0.0  # as the caller saw it
    bytes_sent: int = 0
    bytes_received: int = 0

    def __add__(self, other: CallCost) -> CallCost:
        """Both calls, one after the other."""
        return CallCost(
            self.forward_s + other.forward_s,
            self.queue_s + other.queue_s,
            self.num_forwards + other.num_forwards,
            max(self.batch_size, other.batch_size),
            max(self.batch_tokens, other.batch_tokens),
            self.wall_s + other.wall_s,
            self.bytes_sent + other.bytes_sent,
            self.bytes_received + other.bytes_received,
        )


@dataclass(frozen=True, slots=True)
class PrefixStatement:
    """What the caller states about the session: the replica makes its cache agree or raises PrefixMismatch.

    Committed tokens are `[first prefix_len tokens, believed cached] + new_token_ids`.
    """

    session_id: str
    round_index: int  # never falls within a session; an older one is a stale duplicate
    prefix_len: int
    prefix_crc: int  # crc32 of the int32 little-endian bytes of the first prefix_len committed tokens
    new_token_ids: IntArray  # [m ≥ 1], the anchor last

    @property
    def num_committed(self) -> int:
        return self.prefix_len + len(self.new_token_ids)


def prefix_crc(token_ids: NDArray[np.integer]) -> int:
    """Checksum of a token prefix; guards a replica against serving another session's or an outdated cache."""
    return zlib.crc32(np.ascontiguousarray(token_ids, "<i4").tobytes())


@dataclass(frozen=True, slots=True)
class DraftCall:
    """Asks a drafter for `num_draft_tokens` tokens after the anchor."""

    prefix: PrefixStatement
    num_draft_tokens: int
    effort: Effort
    sampling: SamplingParams  # of the draft; the drafter truncates to `draft_top_k` on top of it
    draft_top_k: int
    seed: int  # numbers: randomness.uniforms(seed, DRAFT, 0, n, stream=anchor position, step=denoising step)
    drafted_token_ids: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    """[k] tokens already drafted after the anchor in this round; the new ones follow them, given them. Not cached."""
    features: FeatureArray | None = None
    """[len(new_token_ids) - 1, F · H] of the new tokens but the anchor, which has none yet; None for drafters that need none."""


@dataclass(frozen=True)
class DraftBlock:
    """Contiguous draft tokens with the distributions they were really drawn from. May be shorter than asked, even empty.

    `proposals.row(i)` is the proposal of `token_ids[i]` (trap 3: same temperature, same truncation, float32, drawn from
    exactly this row; one-hot for a deterministic token).
    """

    token_ids: IntArray  # [n]
    proposals: SparseRows  # n rows
    confidences: NDArray[np.float32]  # [n] probability of the token when it was revealed
    max_probs: NDArray[np.float32]  # [n] largest probability of that distribution: independent of the sample
    cached_len: int  # committed tokens in the replica's cache after the call
    cost: CallCost = field(default_factory=CallCost)
    is_local: bool = False  # the caller made it by itself (copied it): no drafter was asked

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @cached_property
    def statistics(self) -> DraftStatistics:
        """What a speculation policy may look at."""
        squares = self.proposals.row_sums(self.proposals.normalised() ** 2)
        confidences, max_probs = (
            np.minimum(np.maximum(values, 0.0, dtype=np.float64), 1.0)  # float32 rounding may lift them above 1
            for values in (self.confidences, self.max_probs)
        )
        return DraftStatistics(confidences, max_probs, squares, self.is_local)

    def followed_by(self, more: DraftBlock) -> DraftBlock:
        """This block and the tokens drafted after it, with the costs of both calls added."""
        return DraftBlock(
            np.concatenate([self.token_ids, more.token_ids]),
            SparseRows.concatenate([self.proposals, more.proposals]),
            np.concatenate([self.confidences, more.confidences]),
            np.concatenate([self.max_probs, more.max_probs]),
            more.cached_len,
            self.cost + more.cost,
            self.is_local,
        )

    def head(self, length: int) -> DraftBlock:
        """The first `length` draft tokens."""
        if length == self.num_tokens:
            return self
        return DraftBlock(
            self.token_ids[:length], self.proposals.head(length), self.confidences[:length], self.max_probs[:length],
            self.cached_len, self.cost, self.is_local,
        )  # fmt: skip

    @staticmethod
    def empty(cached_len: int = 0) -> DraftBlock:
        none = np.zeros(0, np.float32)
        return DraftBlock(np.zeros(0, np.int32), SparseRows.from_rows([]), none, none, cached_len)


@dataclass(frozen=True, slots=True)
class VerifyCall:
    """Asks the verifier for target rows at the d draft positions and the one after them (d = 0: plain decoding)."""

    prefix: PrefixStatement
    draft_token_ids: IntArray  # [d]
    sampling: SamplingParams
    proposals: SparseRows | None  # d rows; needed only when `sampling.may_be_wide`
    target_uniforms: NDArray[np.float64]  # [d + 1]; draws recovered and plain tokens of wide rows
    hold_rows: bool = False  # keep wide rows until the session's next call: a ResolveCall may follow
    feature_layers: tuple[int, ...] = ()  # ascending; asks for the features of the tokens this call adds; (): for none
    feature_start: int = 0  # position of the first token whose features are wanted, at least prefix_len
    processing: LogitProcessing | None = None  # done to the logits first; None: nothing
    num_prompt_tokens: int = 0  # with `processing`: where the output starts
    ending_token_ids: tuple[int, ...] = ()  # with `processing.min_tokens`: what it forbids
    num_logprobs: int | None = None  # asks for logprobs, and so many of the most probable tokens; None: for none

    @property
    def num_feature_rows(self) -> int:
        """Tokens whose features are asked for, drafted ones included."""
        if not self.feature_layers:
            return 0
        return self.prefix.num_committed + len(self.draft_token_ids) - self.feature_start


@dataclass(frozen=True, slots=True)
class ResolveCall:
    """Asks for one recovered token of the last verify call of a session, whose wide rows the verifier still holds:
    drawn from norm([scale·p - q]+) at a draft position, by inverse CDF over token order."""

    session_id: str
    round_index: int  # of the verify call
    position: int  # row within it
    scale: float
    uniform: float
    proposal: SparseRows  # one row, the position's


@dataclass(frozen=True, slots=True)
class ResolvedToken:
    """The answer to a ResolveCall."""

    token_id: int
    cost: CallCost = field(default_factory=CallCost)
    logprob: float | None = None  # if the verify call asked for logprobs


@dataclass(frozen=True, slots=True)
class TargetRows:
    """The verifier's law at d + 1 positions, in one of two forms.

    Narrow (`recovered_token_ids is None`): `rows` holds the d + 1 whole rows.
    Wide: `rows` holds the target's probabilities on the *proposals'* support (d rows, same row_splits and token_ids as
    the proposals sent, zeros kept), and the tokens that would be needed were drawn where the whole rows live.
    """

    rows: SparseRows
    row_mass: NDArray[np.float64]  # [d + 1] sum of the whole float32 row: the law is row / mass
    recovered_token_ids: IntArray | None  # [d] from norm([target - proposal]+), by target_uniforms[:d]
    plain_token_ids: IntArray | None  # [d + 1] from the target row, by target_uniforms
    cached_len: int  # committed + draft tokens now in the replica's cache
    cost: CallCost = field(default_factory=CallCost)
    features: FeatureArray | None = None  # [num_feature_rows, F · H] as asked for, in order; None if they were not
    logprobs: TargetLogprobs | None = None  # None if they were not asked for

    @property
    def is_wide(self) -> bool:
        return self.recovered_token_ids is not None


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """What a drafter is, for checks at start-up."""

    name: str
    vocab_size: int  # ids ≥ this never occur
    max_model_len: int
    max_draft_tokens: int
    reveal_orders: tuple[str, ...]  # supported; deterministic drafters support all (order means nothing to them)
    is_deterministic: bool  # proposals are one-hot whatever the temperature
    reports_true_proposals: bool  # trap 3: what it reports is what it draws from
    feature_layers: tuple[int, ...] = ()
    """Verifier layers, ascending from 0, whose output hidden states it must be told; (): none. (The last layer's is what
    goes into the final norm.)"""
    feature_size: int = 0  # numbers they make up per token, F · H
    calibration: CalibrationTable = ()
    """[positions][NUM_BINS] what its `max_probs` were worth in training (core/calibration.py); (): not known."""


@dataclass(frozen=True, slots=True)
class VerifierInfo:
    """What a verifier is, for checks at start-up and limits per request."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    num_layers: int = 0  # whose hidden states it gives as features; 0: it gives none
    hidden_size: int = 0  # of each


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What one round did and took; durations in seconds."""

    num_drafted: int
    num_verified: int
    num_accepted: int
    draft: CallCost
    verify: CallCost
    decide_s: float  # all that is not waiting for a role: choose + accept + commit, router arithmetic
    wall_s: float
    degraded: bool
    drafted_ahead: bool | None = None  # whether a draft asked for ahead was used; None: none had been


@dataclass(frozen=True, slots=True)
class Receipt:
    """A request's deviation from the target, computed exactly on the rows, and what its rounds did.

    Per reached position: TV and KL (nats) between the law really sampled and the target's law. KL is infinite where
    the proposal leaves a truncated target's support; such positions are counted in `num_infinite_kl` and `mean_kl` is
    then None. Token counts cover kept tokens only (nothing after EOS, a stop string or max_tokens).
    """

    tier: str
    config: DecodeConfig
    num_rounds: int
    num_draft_tokens: int  # verified draft tokens
    num_accepted_tokens: int  # kept accepted draft tokens; bonus and recovered excluded
    acceptance_histogram: tuple[int, ...]  # [j] = rounds that kept j accepted draft tokens
    num_tokens: int
    mean_tv: float
    max_tv: float
    total_tv: float
    mean_kl: float | None
    num_infinite_kl: int
    exact: bool  # the law sampled is the target's at every position
    degraded: bool  # some rounds ran without the drafter because it failed
    verifier_rebuilds: int  # times the session was rebuilt on a verifier from committed tokens

    @property
    def mean_acceptance_length(self) -> float:
        """Kept tokens per round, recovered or bonus token included, as vLLM counts it."""
        return self.num_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """What one round adds to the answer. The last chunk, and only it, has `finish_reason` and `receipt`."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None  # "stop" | "length"
    receipt: Receipt | None = None
    rounds: tuple[RoundRecord, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token, if the request asked for them
