"""Test doubles behind the same seams as the real engines: small tables instead of networks.

They keep the real prefix protocol (SessionTable), so a loop that works on them has stated its prefixes correctly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from specdiff_dist.core import sampling
from specdiff_dist.core.acceptance import residual
from specdiff_dist.core.calibration import CalibrationTable
from specdiff_dist.core.features import FeatureArray, FeatureRows
from specdiff_dist.core.logit_processing import LogitProcessing
from specdiff_dist.core.rows import SparseRows
from specdiff_dist.drafters.denoise import Predict, Prediction, denoise
from specdiff_dist.errors import InvalidRequest, InvalidRows, PrefixMismatch
from specdiff_dist.session_prefix import SessionTable
from specdiff_dist.types import (
    CallCost,
    DraftBlock,
    DraftCall,
    DrafterInfo,
    GenerateRequest,
    ResolveCall,
    ResolvedToken,
    SamplingParams,
    TargetRows,
    VerifierInfo,
    VerifyCall,
)  # fmt: skip
from tests.plain_logits import log_softmax, plain_logprobs, processed_rows

Logits = Callable[[tuple[int, ...]], np.ndarray]  # prefix -> float32 [vocab_size]


def random_table(vocab_size: int, seed: int = 0, *, sharpness: float = 1.5, order: int | None = None) -> Logits:
    """Fixed pseudo-random float32 logits per prefix (of its last `order` tokens, if given)."""
    memory: dict[tuple[int, ...], np.ndarray] = {}

    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        key = prefix if order is None else prefix[-order:]
        if key not in memory:
            rng = np.random.default_rng([seed, len(key), *key])
            memory[key] = (sharpness * rng.standard_normal(vocab_size)).astype(np.float32)
        return memory[key]

    return logits


HIDDEN_SIZE = 3  # of a table verifier that gives features


@cache
def _table_feature(tokens: tuple[int, ...], layer: int) -> FeatureArray:
    return np.random.default_rng([17, layer, len(tokens), *tokens]).standard_normal(HIDDEN_SIZE).astype(np.float16)


def table_features(tokens: Sequence[int], layers: Sequence[int], start: int = 0) -> FeatureArray:
    """What a TableVerifier says of the tokens from position `start` on: numbers that depend on each token and all before."""
    rows = [
        np.concatenate([_table_feature(tuple(tokens[: position + 1]), layer) for layer in layers])
        for position in range(start, len(tokens))
    ]
    return np.stack(rows) if rows else np.zeros((0, HIDDEN_SIZE * len(layers)), np.float16)


def processed_probs(logits: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """float32 [vocab_size]: temperature, top-k, top-p, by the plainest code possible."""
    if sampling.is_greedy:
        return np.eye(len(logits), dtype=np.float32)[int(np.argmax(logits))]
    scaled = logits.astype(np.float64) / sampling.temperature
    if 0 < sampling.top_k < len(logits):
        scaled = np.where(scaled < np.sort(scaled)[-sampling.top_k], -np.inf, scaled)
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    if sampling.top_p < 1.0:
        order = np.argsort(-probs, kind="stable")
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= sampling.top_p]] = 0.0
        probs /= probs.sum()
    return probs.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class _Held:
    """What a wide verify call was answered from."""

    call: VerifyCall
    rows: list[np.ndarray]
    logits: list[np.ndarray]  # raw


class TableVerifier:
    """A VerifierEngine over a table. `wide` forces wide replies, whatever the support."""

    def __init__(
        self,
        logits: Logits,
        vocab_size: int,
        *,
        eos_token_ids: tuple[int, ...] = (),
        max_model_len: int = 4096,
        max_sessions: int = 64,
        wide: bool = False,
        num_layers: int = 0,
    ) -> None:
        hidden_size = HIDDEN_SIZE if num_layers else 0
        self.info = VerifierInfo("table", vocab_size, max_model_len, eos_token_ids, "float32", num_layers, hidden_size)
        self.calls: list[VerifyCall] = []
        self._logits, self._wide = logits, wide
        self._held: dict[str, _Held] = {}
        self._sessions: SessionTable[None] = SessionTable(lambda: None, max_sessions=max_sessions)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def cached_len(self, session_id: str) -> int:
        return self._sessions.get(session_id).cached_len

    def verify(self, call: VerifyCall) -> TargetRows:
        self.calls.append(call)
        session = self._sessions.get(call.prefix.session_id)
        if call.prefix.num_committed + len(call.draft_token_ids) > self.info.max_model_len:
            raise InvalidRequest("over the context length")
        session.agree(call.prefix)
        session.extend(np.concatenate([call.prefix.new_token_ids, call.draft_token_ids]))
        tokens = tuple(session.token_ids.tolist())
        first = call.prefix.num_committed
        logits = [self._logits(tokens[: first + i]) for i in range(len(call.draft_token_ids) + 1)]
        if not all(np.all(np.isfinite(row)) for row in logits):
            raise InvalidRows("the verifier's logits are not finite")
        rows = [processed_probs(row, call.sampling) for row in processed_rows(logits, call, tokens)]
        mass = np.array([row.astype(np.float64).sum() for row in rows])
        cost = CallCost(forward_s=1e-6, num_forwards=1)
        features = None
        if call.feature_layers:
            features = table_features(tokens, call.feature_layers, call.feature_start)
        if self._wide:
            self._held[call.prefix.session_id] = _Held(call, rows, logits)
            target = wide_rows(rows, mass, call, session.cached_len, cost)
        else:
            everything = np.arange(self.info.vocab_size)
            whole = SparseRows.from_rows([(everything, row) for row in rows])
            target = TargetRows(whole, mass, None, None, session.cached_len, cost)
        return dataclasses.replace(target, features=features, logprobs=plain_logprobs(logits, target, call))

    def resolve(self, call: ResolveCall) -> ResolvedToken:
        held = self._held.get(call.session_id)
        if held is None or held.call.prefix.round_index != call.round_index:
            raise PrefixMismatch(0)
        row = held.rows[call.position].astype(np.float64)
        ids, probs = call.proposal.row(0)[0], call.proposal.normalised()
        everything = np.arange(len(row), dtype=np.int32)
        left = residual(everything, row / row.sum(), ids, probs, call.scale)
        token_id = sampling.draw_index(left, call.uniform)
        is_asked = held.call.num_logprobs is not None
        logprob = float(log_softmax(held.logits[call.position])[token_id]) if is_asked else None
        return ResolvedToken(token_id, CallCost(1e-6), logprob)

    def release(self, session_id: str) -> None:
        self._sessions.drop(session_id)
        self._held.pop(session_id, None)


def wide_rows(
    rows: list[np.ndarray], mass: np.ndarray, call: VerifyCall, cached_len: int, cost: CallCost
) -> TargetRows:
    """A wide reply from whole rows (float32 [vocab_size] each), by the plainest code possible."""
    proposals = call.proposals
    if proposals is None:
        raise InvalidRequest("wide target rows need the proposals")
    everything = np.arange(len(rows[0]), dtype=np.int32)
    draft_probs = proposals.normalised()
    on_support = np.concatenate(
        [rows[i][proposals.row(i)[0]] for i in range(proposals.num_rows)] or [np.zeros(0, np.float32)]
    )
    recovered, plain = [], []
    for i, row in enumerate(rows):
        law = row.astype(np.float64) / mass[i]
        plain.append(sampling.draw_index(law, float(call.target_uniforms[i])))
        if i < proposals.num_rows:
            start, stop = proposals.row_splits[i], proposals.row_splits[i + 1]
            left = residual(everything, law, proposals.token_ids[start:stop], draft_probs[start:stop])
            recovered.append(sampling.draw_index(left, float(call.target_uniforms[i])))
    return TargetRows(
        SparseRows(proposals.row_splits, proposals.token_ids, on_support.astype(np.float32)),
        mass, np.array(recovered, np.int32), np.array(plain, np.int32), cached_len, cost,
    )  # fmt: skip


class Direct:
    """Roles over engines without a thread or an event loop: nothing ever suspends."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def info(self) -> Any:
        return self._engine.info

    async def draft(self, call: Any) -> Any:
        return self._engine.draft(call)

    async def verify(self, call: Any) -> Any:
        return self._engine.verify(call)

    async def resolve(self, call: Any) -> Any:
        return self._engine.resolve(call)

    async def release(self, session_id: str) -> None:
        self._engine.release(session_id)


class ScriptedDrafter:
    """A DrafterEngine whose tokens a plain function of the committed prefix decides: one-hot, deterministic."""

    def __init__(
        self,
        script: Callable[[tuple[int, ...], int], Sequence[int]],
        vocab_size: int,
        *,
        max_model_len: int = 4096,
        max_draft_tokens: int = 64,
        max_sessions: int = 64,
        calibration: CalibrationTable = (),
    ) -> None:
        self.info = DrafterInfo(
            "scripted", vocab_size, max_model_len, max_draft_tokens,
            ("left_to_right", "max_prob", "token_prob", "entropy"), is_deterministic=True, reports_true_proposals=True,
            calibration=calibration,
        )  # fmt: skip
        self.calls: list[DraftCall] = []
        self._script = script
        self._sessions: SessionTable[None] = SessionTable(lambda: None, max_sessions=max_sessions)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def cached_len(self, session_id: str) -> int:
        return self._sessions.get(session_id).cached_len

    def draft(self, call: DraftCall) -> DraftBlock:
        self.calls.append(call)
        session = self._sessions.get(call.prefix.session_id)
        session.agree(call.prefix)
        prefix = (*session.token_ids.tolist(), *call.prefix.new_token_ids.tolist(), *call.drafted_token_ids.tolist())
        session.extend(call.prefix.new_token_ids[:-1])  # the anchor is never cached
        tokens = np.array(list(self._script(prefix, call.num_draft_tokens)), np.int32)
        ones = np.ones(len(tokens), np.float32)
        return DraftBlock(tokens, SparseRows.one_hot(tokens), ones, ones, session.cached_len, CallCost(1e-6))

    def release(self, session_id: str) -> None:
        self._sessions.drop(session_id)


class TableDrafter:
    """A DrafterEngine over a table of logits per (prefix, block so far, position); the real denoising loop on top.

    Its rows depend on everything already revealed, to the left and to the right, as a masked diffusion model's do.
    `dishonest` breaks trap 3: it reports its rows at half the temperature it draws at.
    """

    def __init__(self, vocab_size: int, seed: int = 1, *, sharpness: float = 1.5, dishonest: bool = False) -> None:
        self.info = DrafterInfo(
            "table", vocab_size, 4096, 64, ("left_to_right", "max_prob", "token_prob", "entropy"),
            is_deterministic=False, reports_true_proposals=not dishonest,
        )  # fmt: skip
        self._table = random_table(vocab_size, seed, sharpness=sharpness)
        self._vocab_size, self._dishonest = vocab_size, dishonest
        self._sessions: SessionTable[None] = SessionTable(lambda: None, max_sessions=64)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def draft(self, call: DraftCall) -> DraftBlock:
        session = self._sessions.get(call.prefix.session_id)
        session.agree(call.prefix)
        anchor_position = call.prefix.num_committed - 1
        prefix = (*session.token_ids.tolist(), *call.prefix.new_token_ids.tolist(), *call.drafted_token_ids.tolist())
        session.extend(call.prefix.new_token_ids[:-1])
        tokens, rows, confidences, max_probs = denoise(
            self._predict(prefix, call.sampling, call), call.num_draft_tokens, call.effort, call.sampling,
            call.draft_top_k, call.seed, anchor_position, len(call.drafted_token_ids),
        )  # fmt: skip
        if self._dishonest:  # reports the rows at another temperature than it drew from
            sharper = SparseRows(rows.row_splits, rows.token_ids, rows.probs**2)
            rows = SparseRows(rows.row_splits, rows.token_ids, sharper.normalised().astype(np.float32))
        return DraftBlock(tokens, rows, confidences, max_probs, session.cached_len, CallCost(1e-6))

    def _predict(self, prefix: tuple[int, ...], sampling: SamplingParams, call: DraftCall) -> Predict:
        def predict(block: np.ndarray, positions: np.ndarray) -> Prediction:
            rows, largest, entropies = [], [], []
            for position in positions.tolist():
                key = (len(prefix), *prefix, *(block + 1).tolist(), position)
                logits = self._table(key)
                probs = processed_probs(logits, sampling)
                keep = np.argsort(-probs, kind="stable")[: call.draft_top_k]
                rows.append((keep, probs[keep] / probs[keep].sum()))
                raw = processed_probs(logits, SamplingParams(1.0)).astype(np.float64)
                largest.append(raw.max())
                entropies.append(-(raw * np.log(raw)).sum())
            return Prediction(
                SparseRows.from_rows(rows), np.array(largest, np.float32), np.array(entropies, np.float32)
            )

        return predict

    def release(self, session_id: str) -> None:
        self._sessions.drop(session_id)


class FeatureDrafter(TableDrafter):
    """A TableDrafter that must be told a TableVerifier's features: they are checked, and its rows depend on them."""

    def __init__(self, vocab_size: int, layers: tuple[int, ...] = (1, 4), *, seed: int = 1) -> None:
        super().__init__(vocab_size, seed)
        size = HIDDEN_SIZE * len(layers)
        self.info = dataclasses.replace(self.info, feature_layers=layers, feature_size=size)
        self.num_told = 0  # tokens whose features came, repeats included
        self._sessions: Any = SessionTable(lambda: FeatureRows(size), max_sessions=64)

    def draft(self, call: DraftCall) -> DraftBlock:
        session = self._sessions.get(call.prefix.session_id)
        rows: FeatureRows = session.cache
        told = call.features
        assert told is not None and len(told) == len(call.prefix.new_token_ids) - 1
        self.num_told += len(told)
        block = super().draft(call)  # agrees on the prefix first
        rows.crop(call.prefix.prefix_len)
        rows.extend(told)
        expected = table_features(session.token_ids.tolist(), self.info.feature_layers)
        assert rows.of(0, rows.length).tobytes() == expected.tobytes(), "not the features of the committed tokens"
        return block

    def _predict(self, prefix: tuple[int, ...], sampling: SamplingParams, call: DraftCall) -> Predict:
        seen = () if call.features is None else tuple(call.features.view(np.uint16).ravel().tolist())
        return super()._predict((*seen, *prefix), sampling, call)


def greedy_script(logits: Logits) -> Callable[[tuple[int, ...], int], list[int]]:
    """The drafter that is the target itself: its own greedy continuation."""

    def script(prefix: tuple[int, ...], num_tokens: int) -> list[int]:
        tokens = list(prefix)
        for _ in range(num_tokens):
            tokens.append(int(np.argmax(logits(tuple(tokens)))))
        return tokens[len(prefix) :]

    return script


def make_request(
    prompt: Sequence[int] = (1,),
    *,
    max_tokens: int = 16,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: tuple[str, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
    request_id: str = "request",
    processing: LogitProcessing | None = None,
    num_logprobs: int | None = None,
) -> GenerateRequest:
    """A request with test defaults."""
    sampling = SamplingParams(temperature, top_k, top_p)
    return GenerateRequest(
        request_id,
        tuple(prompt),
        sampling,
        seed,
        max_tokens,
        stop,
        stop_token_ids,
        ignore_eos,
        processing,
        num_logprobs,
    )


def plain_greedy(logits: Logits, prompt: Sequence[int], max_tokens: int, eos: tuple[int, ...] = ()) -> list[int]:
    """What the verifier alone would say, by the shortest code possible."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(np.argmax(logits(tuple(tokens)))))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


__all__ = [
    "Direct", "FeatureDrafter", "Logits", "ScriptedDrafter", "TableDrafter", "TableVerifier", "greedy_script", "make_request", "plain_greedy",
    "processed_probs", "random_table", "table_features", "wide_rows",
]  # fmt: skip
