"""One request's decoding state, kept by the caller of the roles: any replica can be rebuilt from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TypedDict

import numpy as np

from specdiff_dist.config import DecodeConfig
from specdiff_dist.core.acceptance import Acceptance
from specdiff_dist.core.exactness import is_exact
from specdiff_dist.core.features import FeatureArray, FeatureRows, fault, max_rows
from specdiff_dist.core.limits import TVLimits
from specdiff_dist.core.logit_processing import LogitProcessing
from specdiff_dist.core.rows import IntArray
from specdiff_dist.core.rules import Cactus, Lenience, needs_entropy
from specdiff_dist.core.speculation import Knowledge, Off
from specdiff_dist.engine.stopping import Detokenizer, StopMonitor
from specdiff_dist.errors import InvalidRequest, InvalidRows
from specdiff_dist.types import (
    MAX_NARROW_SUPPORT,
    DraftCall,
    DrafterInfo,
    GenerateRequest,
    PrefixStatement,
    Receipt,
    SamplingParams,
    VerifierInfo,
    VerifyCall,
    prefix_crc,
)  # fmt: skip

NO_TOKENS: IntArray = np.zeros(0, np.int32)


class LogitFields(TypedDict, total=False):
    """Fields of a VerifyCall."""

    processing: LogitProcessing
    num_prompt_tokens: int
    ending_token_ids: tuple[int, ...]


class Session:
    """Committed tokens, what each replica is believed to cache of them, and the running receipt."""

    def __init__(
        self,
        request: GenerateRequest,
        config: DecodeConfig,
        tier: str,
        verifier: VerifierInfo,
        drafter: DrafterInfo | None,
        detokenizer: Detokenizer | None,
        knowledge: Knowledge,
    ) -> None:
        num_prompt = len(request.prompt_token_ids)
        if num_prompt + request.max_tokens > verifier.max_model_len:
            raise InvalidRequest(
                f"This model's maximum context length is {verifier.max_model_len} tokens, but {num_prompt} prompt tokens "
                f"+ {request.max_tokens} max_tokens were asked for; shorten the prompt or lower max_tokens",
                param="max_tokens",
            )
        if max(request.prompt_token_ids) >= verifier.vocab_size or min(request.prompt_token_ids) < 0:
            raise InvalidRequest(f"prompt token ids must be in [0, {verifier.vocab_size})", param="prompt")
        is_small = verifier.vocab_size <= MAX_NARROW_SUPPORT
        if needs_entropy(config.rule) and request.sampling.may_be_wide and not is_small:
            raise InvalidRequest(  # now: whether a row is wide shows only when it is there, in the middle of the answer
                f"the typical rule needs whole target rows; set top_k to 1 … {MAX_NARROW_SUPPORT}", param="top_k"
            )
        self.request, self.config, self.tier = request, config, tier
        self.monitor = StopMonitor(request, verifier.eos_token_ids, detokenizer)
        self._tokens = np.zeros(num_prompt + request.max_tokens, np.int32)  # committed, prompt first
        self._tokens[:num_prompt] = request.prompt_token_ids
        self.num_committed = num_prompt
        self.vocab_size = verifier.vocab_size
        self.ending_token_ids = tuple(id for id in self.monitor.ending_token_ids if id < verifier.vocab_size)
        if request.processing is not None:
            request.processing.check_ids(verifier.vocab_size, self.ending_token_ids)
        self.round_index = 0
        self.drafter_cached = self.verifier_cached = 0  # committed tokens the replicas are believed to cache
        told = None if isinstance(config.policy, Off) else drafter
        self.feature_layers = () if told is None else told.feature_layers
        self._features = FeatureRows(0 if told is None else told.feature_size)
        self.degraded = False
        self.verifier_rebuilds = 0
        greedy = request.sampling.is_greedy
        # A greedy target is one token; these rules never accept what the target excludes, so they change nothing there.
        changes_nothing = greedy and isinstance(config.rule, Lenience | Cactus)
        self._exact = changes_nothing or is_exact(config, drafter, greedy_draft=greedy)
        # Greedy requests are drafted greedily: a sampled draft could only be accepted less.
        temperature = config.draft_temperature if config.draft_temperature is not None and not greedy else None
        self.draft_sampling = SamplingParams(
            request.sampling.temperature if temperature is None else temperature,
            request.sampling.top_k,
            request.sampling.top_p,
        )
        self._num_drafted = self._num_accepted = 0
        self._histogram: list[int] = []
        self._tv_sum = self._tv_max = self._kl_sum = 0.0
        self.knowledge = knowledge
        self.waited_s = 0.0
        self._tv_left = config.tv_budget
        self._num_infinite_kl = 0

    @property
    def finish_reason(self) -> str | None:
        return self.monitor.finish_reason

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a call to a role: what a round takes beside `waited_s` is the router's own time."""
        started = perf_counter()
        try:
            yield
        finally:
            self.waited_s += perf_counter() - started

    @property
    def processing(self) -> LogitProcessing | None:
        """What is left to be done to the target's logits."""
        processing = self.request.processing
        return None if processing is None else processing.after(self.monitor.num_tokens)

    @property
    def asked_of_logits(self) -> LogitFields:
        """The fields of the next verify call that say so; none for most requests."""
        processing = self.processing
        if processing is None:
            return {}
        ending = self.ending_token_ids if processing.min_tokens else ()
        num_prompt = len(self.request.prompt_token_ids)
        return {"processing": processing, "num_prompt_tokens": num_prompt, "ending_token_ids": ending}

    @property
    def limits(self) -> TVLimits:
        """What the request's budgets leave for the next round: nothing where tokens are forbidden, since a lossy rule
        would let drafts of them through."""
        processing = self.processing
        is_strict = processing is not None and processing.forbids_tokens
        return TVLimits(0.0 if is_strict else self.config.max_tv_per_token, self._tv_left)

    @property
    def num_tokens_left(self) -> int:
        return self.request.max_tokens - self.monitor.num_tokens

    def tokens_from(self, start: int) -> IntArray:
        """The committed tokens from position `start` on."""
        return self._tokens[start : self.num_committed]

    def room_for_draft(self, info: DrafterInfo | None, num_more: int = 0) -> int:
        """Tokens that a round may draft, once `num_more` more are committed."""
        room = self.num_tokens_left - num_more - 1  # one token of the round is the verifier's own
        if info is None:
            return room
        return min(room, info.max_draft_tokens, info.max_model_len - self.num_committed - num_more)

    def draft_call(self, prefix: PrefixStatement, num_tokens: int, drafted: IntArray = NO_TOKENS) -> DraftCall:
        """Asks for `num_tokens` tokens after those `drafted` in the round already."""
        return DraftCall(
            prefix, num_tokens, self.config.effort, self.draft_sampling, self.config.draft_top_k, self.request.seed,
            drafted, self.features_of(prefix),
        )  # fmt: skip

    def state_prefix(self, cached_len: int, end: int | None = None) -> PrefixStatement:
        """States the committed prefix, or its first `end` tokens, to a replica believed to cache `cached_len` of it. The
        anchor is always new."""
        end = self.num_committed if end is None else end
        cached_len = min(cached_len, end - 1)
        return PrefixStatement(
            self.request.request_id,
            self.round_index,
            cached_len,
            prefix_crc(self._tokens[:cached_len]),
            self._tokens[cached_len:end].copy(),
        )

    @property
    def verifier_prefix_len(self) -> int:
        """What a verify call states as cached: not beyond the first token whose features are still to be had."""
        if self.feature_layers:
            return min(self.verifier_cached, self._features.length, self.num_committed - 1)
        return min(self.verifier_cached, self.num_committed - 1)

    @property
    def num_featured(self) -> int:
        """Leading committed tokens whose features are here; without features all but the anchor count."""
        return self._features.length if self.feature_layers else self.num_committed - 1

    @property
    def max_new_tokens(self) -> int:
        """Tokens that one call may bring or add, so that their features fit."""
        return max_rows(self._features.size) if self.feature_layers else self.num_committed

    def features_of(self, prefix: PrefixStatement) -> FeatureArray | None:
        """What a drafter is told with `prefix`: of its new tokens but the last."""
        if not self.feature_layers:
            return None
        return self._features.of(prefix.prefix_len, prefix.num_committed - 1)

    def keep_features(self, call: VerifyCall, features: FeatureArray | None, num_tokens: int) -> None:
        """Takes those of the text's first `num_tokens` tokens out of the reply to `call`, which asked from the first
        unknown one on. The rest belongs to rejected drafts. Raises InvalidRows."""
        if not self.feature_layers:
            return
        wrong = fault(features, call.num_feature_rows, self._features.size)
        if wrong or features is None:
            raise InvalidRows(f"verify reply: {wrong}")
        self._features.extend(features[: num_tokens - call.feature_start])

    def commit(self, outcome: Acceptance, num_verified: int) -> tuple[tuple[int, ...], str]:
        """Appends a round's tokens up to a stop; returns the kept ones and the text to show.

        The verifier caches everything it was sent; valid are the committed tokens and the accepted drafts.
        """
        self.verifier_cached = self.num_committed + outcome.num_accepted
        kept: list[int] = []
        text = ""
        for token in outcome.token_ids.tolist():
            kept.append(token)
            text += self.monitor.push(token)
            if self.finish_reason is not None:
                break
        self._tokens[self.num_committed : self.num_committed + len(kept)] = kept
        self.num_committed += len(kept)
        self.round_index += 1
        self._count(outcome, num_verified, len(kept))
        return tuple(kept), text

    def _count(self, outcome: Acceptance, num_verified: int, num_kept: int) -> None:
        num_accepted = min(outcome.num_accepted, num_kept)
        tv, kl = outcome.tv.tolist(), outcome.kl[:num_kept].tolist()
        self._tv_left = max(self._tv_left - sum(tv), 0.0)
        self._num_drafted += num_verified
        self._num_accepted += num_accepted
        self._histogram.extend([0] * (num_accepted + 1 - len(self._histogram)))
        self._histogram[num_accepted] += 1
        finite = [value for value in kl if math.isfinite(value)]
        self._tv_sum += sum(tv[:num_kept])
        self._tv_max = max(self._tv_max, *tv[:num_kept])
        self._kl_sum += sum(finite)
        self._num_infinite_kl += len(kl) - len(finite)

    def receipt(self) -> Receipt:
        """The deviation and the counts so far."""
        num_tokens = self.monitor.num_tokens
        per_token = 1.0 / num_tokens if num_tokens else math.nan
        return Receipt(
            tier=self.tier,
            config=self.config,
            num_rounds=self.round_index,
            num_draft_tokens=self._num_drafted,
            num_accepted_tokens=self._num_accepted,
            acceptance_histogram=tuple(self._histogram),
            num_tokens=num_tokens,
            mean_tv=self._tv_sum * per_token,
            max_tv=self._tv_max,
            total_tv=self._tv_sum,
            mean_kl=None if self._num_infinite_kl else self._kl_sum * per_token,
            num_infinite_kl=self._num_infinite_kl,
            exact=self._exact,
            degraded=self.degraded,
            verifier_rebuilds=self.verifier_rebuilds,
        )
