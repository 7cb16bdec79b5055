"""The verifier engine: sessions over a model's forward pass."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np
import torch

from specdiff_dist.batching import Steps, run_alone
from specdiff_dist.core.features import FeatureArray
from specdiff_dist.core.rows import IntArray
from specdiff_dist.errors import InvalidConfig, InvalidRequest, PrefixMismatch
from specdiff_dist.session_prefix import SessionPrefix, SessionTable, check_anchor
from specdiff_dist.types import (
    CallCost,
    ResolveCall,
    ResolvedToken,
    SamplingParams,
    TargetRows,
    VerifierInfo,
    VerifyCall,
)
from specdiff_dist.verifiers.features import wire_features
from specdiff_dist.verifiers.forward import Forwarded, ForwardPart, ModelForward
from specdiff_dist.verifiers.held_rows import HeldRows
from specdiff_dist.verifiers.narrow_rows import can_be_narrow, narrow_rows
from specdiff_dist.verifiers.shared_prefixes import MAX_TOKENS, SharedPrefixes
from specdiff_dist.verifiers.target_rows import target_rows

CacheT = TypeVar("CacheT")

PREFILL_CHUNK = {"cpu": 128}  # tokens per forward: other sessions wait so long, at most, when a long prompt comes
PREFILL_CHUNK_ELSEWHERE = 1024


class CausalLMVerifier(Generic[CacheT]):
    """A VerifierEngine that batches: makes a session's cache agree with the call's prefix, runs the new and draft tokens
    (long prompts in chunks of `prefill_chunk`), and turns the last d + 1 logits into target rows. Calls of several sessions
    share their forwards (batching.py)."""

    def __init__(
        self,
        model: ModelForward[CacheT],
        *,
        name: str,
        eos_token_ids: tuple[int, ...] = (),
        max_model_len: int | None = None,
        max_sessions: int = 64,
        prefill_chunk: int | None = None,
        max_shared_tokens: int = MAX_TOKENS,
    ) -> None:
        """`prefill_chunk`: tokens; None: what suits the model's device. `max_shared_tokens`: of ended sessions' prompts that
        are kept for prompts beginning alike."""
        if max_model_len is not None and not 1 <= max_model_len <= model.max_model_len:
            raise InvalidConfig(f"max_model_len must be 1 … {model.max_model_len} for {name}, not {max_model_len}")
        self._model = model
        self.kv_bytes_per_token, self.device_type = model.kv_bytes_per_token, model.device_type
        self._prefill_chunk = prefill_chunk or PREFILL_CHUNK.get(model.device_type, PREFILL_CHUNK_ELSEWHERE)
        self._info = VerifierInfo(
            name, model.vocab_size, max_model_len or model.max_model_len, eos_token_ids, model.dtype, model.num_layers,
            model.hidden_size,
        )  # fmt: skip
        self._prefixes: SharedPrefixes[CacheT] = SharedPrefixes(model.copy_cache, max_tokens=max_shared_tokens)
        self._sessions: SessionTable[CacheT] = SessionTable(
            model.new_cache, max_sessions=max_sessions, on_drop=self._prefixes.forget
        )

    @property
    def info(self) -> VerifierInfo:
        return self._info

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def verify(self, call: VerifyCall) -> TargetRows:
        """See roles.Verifier. Raises InvalidRequest also for ids outside the vocabulary and over max_model_len."""
        return run_alone(self.verifying(call), self.forward_parts)

    def forward_parts(self, parts: Sequence[ForwardPart[CacheT]]) -> list[Forwarded]:
        """One forward for what `verifying` of several sessions asked for, and the narrow rows of all that sample alike."""
        done = self._model.forward_parts(parts)
        alike: dict[SamplingParams, list[int]] = {}
        for index, part in enumerate(parts):
            if part.sampling is not None and part.num_logits:
                alike.setdefault(part.sampling, []).append(index)
        for sampling, indices in alike.items():
            logits = [done[index].logits for index in indices]
            rows = narrow_rows(
                logits[0] if len(logits) == 1 else torch.cat(logits), [len(one) for one in logits], sampling
            )
            for index, own in zip(indices, rows, strict=True):
                done[index] = replace(done[index], rows=own)
        return done

    def verifying(self, call: VerifyCall) -> Steps[ForwardPart[CacheT], Forwarded, TargetRows]:
        """`verify` as a coroutine that yields the forwards it needs."""
        self._check(call)
        session_id = call.prefix.session_id
        session = self._sessions.get(session_id)
        session.held = None
        length = session.agree(call.prefix)
        tokens = np.concatenate([call.prefix.new_token_ids, call.draft_token_ids]).astype(np.int32)
        try:
            self._model.crop(session.cache, length)
            self._prefixes.cut(session_id, length)
            skipped = call.feature_start - call.prefix.prefix_len  # leading tokens without features
            known = self._begin_alike(call, session) if length == 0 else None
            narrow = call.processing is None and can_be_narrow(call.sampling, self._model.vocab_size)
            forwarded, features = yield from self._forward(
                session,
                tokens[session.cached_len - length :],
                len(call.draft_token_ids) + 1,
                call.feature_layers,
                skipped,
                known,
                call.sampling if narrow else None,
            )
            if length == 0:
                self._share(call, session, features)
            logits = forwarded.logits
            target = target_rows(
                logits, call, cached_len=session.cached_len, token_ids=session.token_ids, narrow=forwarded.rows
            )
            if call.hold_rows and target.is_wide:
                session.held = HeldRows(logits, call, session.token_ids)
            return target if features is None else replace(target, features=features)
        except BaseException:  # whatever it was, the cache may disagree with the token ids now: the caller rebuilds it
            self._sessions.drop(session_id)
            raise

    def resolve(self, call: ResolveCall) -> ResolvedToken:
        """See roles.Verifier."""
        session = self._sessions.find(call.session_id)
        held = session.held if session is not None else None
        if not isinstance(held, HeldRows) or held.round_index != call.round_index:
            raise PrefixMismatch(0)  # verify again: it costs time, never a token
        started = time.perf_counter()
        resolved = held.resolve(call)
        return replace(resolved, cost=CallCost(forward_s=time.perf_counter() - started))

    def release(self, session_id: str) -> None:
        self._prefixes.end(session_id)
        self._sessions.drop(session_id)

    def _begin_alike(self, call: VerifyCall, session: SessionPrefix[CacheT]) -> FeatureArray | None:
        """Gives an empty session what another one has cached of the same tokens, all but the anchor at most; their features
        where they are asked for."""
        found = self._prefixes.find(call.prefix.new_token_ids[:-1], call.feature_layers)
        if found is None:
            return None
        prefix, num_tokens = found
        session.cache = self._model.copy_cache(prefix.cache, num_tokens)
        session.extend(prefix.token_ids[:num_tokens])
        return None if prefix.features is None else prefix.features[:num_tokens]

    def _share(self, call: VerifyCall, session: SessionPrefix[CacheT], features: FeatureArray | None) -> None:
        committed = call.prefix.new_token_ids
        own = features[: len(committed)] if features is not None and call.feature_start == 0 else None
        self._prefixes.add(call.prefix.session_id, committed, session.cache, call.feature_layers, own)

    def _forward(
        self,
        session: SessionPrefix[CacheT],
        tokens: IntArray,
        num_logits: int,
        layers: tuple[int, ...],
        skipped: int,
        known: FeatureArray | None,
        sampling: SamplingParams | None,
    ) -> Steps[ForwardPart[CacheT], Forwarded, tuple[Forwarded, FeatureArray | None]]:
        """Adds `tokens` to the session; the last `num_logits` logits, with narrow rows for `sampling`, and the features of all
        but the first `skipped` tokens (None without layers). `known`: features of tokens before these that the session has
        been given."""
        hidden: list[FeatureArray] = []
        if known is not None and layers:
            hidden.append(known[skipped:])
            skipped = max(skipped - len(known), 0)
        while True:
            is_last = len(tokens) <= max(self._prefill_chunk, num_logits)
            chunk = tokens if is_last else tokens[: min(self._prefill_chunk, len(tokens) - num_logits)]
            forwarded = yield ForwardPart(
                session.cache, chunk, num_logits if is_last else 0, layers if skipped < len(chunk) else (), sampling
            )
            session.extend(chunk)
            if forwarded.features is not None:
                hidden.append(wire_features(forwarded.features[skipped:]))
            skipped = max(skipped - len(chunk), 0)
            tokens = tokens[len(chunk) :]
            if is_last:
                return forwarded, self._joined(hidden, layers)

    def _joined(self, hidden: list[FeatureArray], layers: tuple[int, ...]) -> FeatureArray | None:
        if not layers:
            return None
        return np.concatenate(hidden) if hidden else np.zeros((0, len(layers) * self._info.hidden_size), np.float16)

    def _check(self, call: VerifyCall) -> None:
        check_anchor(call.prefix)
        length = call.prefix.num_committed + len(call.draft_token_ids)
        if length > self._info.max_model_len:
            raise InvalidRequest(
                f"{length} tokens do not fit into the context of {self._info.max_model_len}; shorten the prompt or "
                "max_tokens"
            )
        tokens = np.concatenate([call.prefix.new_token_ids, call.draft_token_ids])
        if tokens.min() < 0 or tokens.max() >= self._info.vocab_size:
            raise InvalidRequest(f"token ids must be 0 … {self._info.vocab_size - 1}; the tokenizer and model differ")
