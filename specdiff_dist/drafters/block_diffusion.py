"""The diffusion drafter: sessions, denoising and truncation around the block model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdiff_dist.batching import Steps, run_alone
from specdiff_dist.config import REVEAL_ORDERS
from specdiff_dist.core.calibration import CalibrationTable, check_table
from specdiff_dist.core.features import FeatureArray, fault
from specdiff_dist.core.rows import IntArray
from specdiff_dist.drafters.block_model import BlockModel, BlockModelConfig, BlockPart
from specdiff_dist.drafters.denoise import Denoised, Prediction, denoising
from specdiff_dist.drafters.linear import has_int8
from specdiff_dist.drafters.truncation import truncated_rows
from specdiff_dist.drafters.weights_file import load_weights
from specdiff_dist.errors import InvalidConfig, InvalidRequest, InvalidRows
from specdiff_dist.session_prefix import SessionTable, check_anchor
from specdiff_dist.types import DraftBlock, DraftCall, DrafterInfo, SamplingParams
from specdiff_dist.verifiers.device import pick_device
from specdiff_dist.verifiers.features import features_tensor
from specdiff_dist.verifiers.folder import read_config, read_embeddings, real_vocab_size
from specdiff_dist.verifiers.llama_layers import KVCache

PREFILL_CHUNK = 512  # tokens per forward
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.qint8}


class BlockDiffusionDrafter:
    """A DrafterEngine around a BlockModel.

    The new committed tokens (all but the anchor) and the block share the first forward; every further denoising step
    runs the block alone. A drafter that is told features makes its cache from those instead, and every forward is the block's
    alone. They are a function of committed tokens, so they change nothing about exactness. Proposals are truncated to `draft_top_k` tokens *before* they are drawn from. The law of a
    proposal may depend on committed tokens, on how they arrived and on tokens revealed earlier: it is recorded as drawn.
    """

    def __init__(
        self,
        model: BlockModel,
        *,
        name: str,
        vocab_size: int | None = None,
        max_sessions: int = 64,
        calibration: CalibrationTable = (),
    ) -> None:
        """`vocab_size`: ids ≥ this are never proposed (padding of the output matrix); default: all of the matrix.
        `calibration`: see DrafterInfo."""
        self._model = model
        self.kv_bytes_per_token, self.device_type = model.config.kv_bytes(model.dtype), model.device.type
        config = model.config
        self._num_columns = model.num_columns(vocab_size or config.vocab_size)
        if self._num_columns == 0:
            raise InvalidConfig(
                f"drafter {name!r} proposes no token the verifier has: its draft_vocab fits another one"
            )
        self._info = DrafterInfo(
            name=name, vocab_size=min(vocab_size or config.vocab_size, config.vocab_size),
            max_model_len=config.max_position_embeddings, max_draft_tokens=config.max_block_size,
            reveal_orders=REVEAL_ORDERS, is_deterministic=False, reports_true_proposals=True,
            feature_layers=config.feature_layers, feature_size=config.feature_size,
            calibration=calibration,
        )  # fmt: skip
        self._sessions: SessionTable[KVCache] = SessionTable(model.new_cache, max_sessions=max_sessions)

    @staticmethod
    def load(
        folder: Path,
        *,
        name: str,
        verifier_folder: Path,
        dtype: str = "auto",
        device: str = "auto",
        max_sessions: int = 64,
    ) -> BlockDiffusionDrafter:
        """Loads `config.json` and the one safetensors file of `folder`, and the verifier's embeddings.

        dtype: float32, bfloat16, int8 (CPU) or auto: int8 on a CPU that runs it, else bfloat16.
        Raises InvalidConfig when the weights were trained for another vocabulary or hidden size than the verifier's,
        ModelUnavailable when files are missing or broken.
        """
        where = pick_device(device)
        torch_dtype = _pick_dtype(dtype, where)
        config = BlockModelConfig.read(folder)
        embedding, output = read_embeddings(verifier_folder)
        real = real_vocab_size(verifier_folder)
        _check_fits(config, embedding, real, name=name, verifier=verifier_folder.name)
        embedding, output = embedding[: config.vocab_size], output[: config.vocab_size]
        model = BlockModel(config, load_weights(folder), embedding, output, dtype=torch_dtype, device=where)
        return BlockDiffusionDrafter(
            model, name=name, vocab_size=real, max_sessions=max_sessions,
            calibration=_calibration(folder),
        )  # fmt: skip

    @property
    def info(self) -> DrafterInfo:
        return self._info

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def draft(self, call: DraftCall) -> DraftBlock:
        """See roles.Drafter. The block is cut to `info.max_draft_tokens` and to the end of the context."""
        return run_alone(self.drafting(call), self.forward_parts)

    def forward_parts(self, parts: Sequence[BlockPart]) -> list[Tensor]:
        """One forward for what `drafting` of several sessions asked for."""
        return self._model.forward_parts(parts)

    def drafting(self, call: DraftCall) -> Steps[BlockPart, Tensor, DraftBlock]:
        """`draft` as a coroutine that yields the forwards it needs."""
        new_ids = call.prefix.new_token_ids
        check_anchor(call.prefix)
        if new_ids.min() < 0 or new_ids.max() >= self._model.config.vocab_size:
            raise InvalidRequest(f"token ids must be 0 … {self._model.config.vocab_size - 1}", param="new_token_ids")
        if self._info.feature_layers and (wrong := fault(call.features, len(new_ids) - 1, self._info.feature_size)):
            raise InvalidRequest(f"drafter {self._info.name!r}: {wrong}", param="features")
        anchor_position = call.prefix.num_committed - 1
        num_before = len(call.drafted_token_ids)
        num_tokens = min(
            call.num_draft_tokens,
            self._info.max_draft_tokens - num_before,
            self._info.max_model_len - anchor_position - num_before,
        )  # the block's input positions are anchor_position … anchor_position + num_tokens - 1
        session = self._sessions.get(call.prefix.session_id)
        length = session.agree(call.prefix)
        if num_tokens < 1:
            return DraftBlock.empty(session.cached_len)

        try:
            session.cache.crop(length)
            unread = new_ids
            if self._info.feature_layers and call.features is not None:
                self._remember(session.cache, new_ids[:-1], call.features)
                unread = new_ids[-1:]
            predictor = _Predictor(self._model, session.cache, unread, self._num_columns, call)
            token_ids, proposals, confidences, max_probs = yield from predictor.denoise(
                num_tokens, call.effort, call.sampling, call.draft_top_k, call.seed,
                anchor_position, num_before,
            )  # fmt: skip
        except BaseException:  # the cache may disagree with the token ids now: let the caller rebuild it
            self._sessions.drop(call.prefix.session_id)
            raise
        session.extend(new_ids[:-1])
        return DraftBlock(token_ids, proposals, confidences, max_probs, session.cached_len)

    def release(self, session_id: str) -> None:
        self._sessions.drop(session_id)

    def _remember(self, cache: KVCache, token_ids: IntArray, features: FeatureArray) -> None:
        ids, states = torch.from_numpy(token_ids.astype(np.int64)).to(self._model.device), features_tensor(features)
        for start in range(0, len(ids), PREFILL_CHUNK):
            part = slice(start, start + PREFILL_CHUNK)
            self._model.remember(cache, ids[part], states[part])


class _Predictor:
    """`denoise`'s callback for one call: the first prediction also adds the new committed tokens to the cache."""

    def __init__(self, model: BlockModel, cache: KVCache, new_ids: IntArray, num_columns: int, call: DraftCall) -> None:
        self._model, self._cache, self._num_columns = model, cache, num_columns
        self._sampling, self._draft_top_k = call.sampling, call.draft_top_k
        ids = torch.from_numpy(new_ids.astype(np.int64)).to(model.device)
        drafted = torch.from_numpy(call.drafted_token_ids.astype(np.int64)).to(model.device)
        self._pending, self._given = ids[:-1], torch.cat([ids[-1:], drafted])

    def denoise(self, *args: Any) -> Steps[BlockPart, Tensor, Denoised]:
        """`denoising`, with every prediction made by the model."""
        steps = denoising(*args)
        try:
            wanted = next(steps)
            while True:
                wanted = steps.send((yield from self.predict(*wanted)))
        except StopIteration as finished:
            return finished.value

    def predict(self, block: IntArray, positions: NDArray[np.int64]) -> Steps[BlockPart, Tensor, Prediction]:
        """A position is fed the token before it: after the anchor and the k tokens drafted earlier in this round, output
        k + j is about block[j]. The block's last token is never an
        input (positions to the left cannot see it, however early it is revealed)."""
        device = self._model.device
        while len(self._pending) > PREFILL_CHUNK:
            yield BlockPart(self._cache, self._pending[:PREFILL_CHUNK], self._pending[:0])
            self._pending = self._pending[PREFILL_CHUNK:]
        known = torch.from_numpy(block[:-1].astype(np.int64)).to(device)
        hidden = yield BlockPart(self._cache, self._pending, torch.cat([self._given, known]))
        self._pending = self._pending[:0]
        wanted = torch.from_numpy(positions + len(self._given) - 1).to(device)
        logits = self._model.logits(hidden[wanted])[:, : self._num_columns]
        return predict_rows(logits, self._sampling, self._draft_top_k, self._model.draft_vocab)


def predict_rows(
    logits: Tensor, sampling: SamplingParams, draft_top_k: int, draft_vocab: Tensor | None = None
) -> Prediction:
    """Proposals from float32 logits [k, c]: the `draft_top_k` largest leave the device, the rest is truncation there.

    Column j is about token draft_vocab[j] (None: token j). `max_probs` is relative to the softmax over all columns at
    temperature 1; `entropies` are those of the candidates alone. Raises InvalidRows on NaN or infinite logits.
    """
    candidates = torch.topk(logits, min(draft_top_k, logits.shape[-1]), dim=-1)
    log_totals = torch.logsumexp(logits, dim=-1).cpu().numpy()
    columns = candidates.indices
    values, ids = (
        candidates.values.cpu().numpy(),
        (columns if draft_vocab is None else draft_vocab[columns]).cpu().numpy(),
    )
    if not np.all(np.isfinite(log_totals)) or not np.all(np.isfinite(values[:, 0])):
        raise InvalidRows("the drafter's logits are NaN or infinite; its weights are broken")
    log_probs = values.astype(np.float64) - log_totals[:, None]
    probs = np.exp(log_probs)
    entropies = -np.sum(probs * np.where(probs > 0, log_probs, 0.0), axis=1)
    return Prediction(
        truncated_rows(ids, values, sampling), probs[:, 0].astype(np.float32), entropies.astype(np.float32)
    )


def _calibration(folder: Path) -> CalibrationTable:
    """Of the folder's config.json; raises InvalidConfig for one that is none."""
    found = read_config(folder).get("calibration") or {}
    try:
        table = tuple(tuple(float(value) for value in row) for row in found.get("table", ()))
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidConfig(f"{folder}: config.json has a calibration that is no table of numbers") from error
    check_table(table, what=str(folder))
    return table


def _pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.qint8 if device.type == "cpu" and has_int8() else torch.bfloat16
    if dtype not in _DTYPES:
        raise InvalidConfig(f"drafter dtype must be auto, {', '.join(_DTYPES)}, not {dtype!r}")
    if dtype == "int8" and device.type != "cpu":
        raise InvalidConfig(f"drafter dtype int8 runs on a CPU only, not on {device}; use bfloat16")
    return _DTYPES[dtype]


def _check_fits(config: BlockModelConfig, embedding: Tensor, real: int | None, *, name: str, verifier: str) -> None:
    """`real`: size of the verifier's vocabulary where it is known. Its matrices may be padded further than the drafter's."""
    vocab_size, hidden_size = embedding.shape
    if real is not None and real <= config.vocab_size < vocab_size:
        vocab_size = config.vocab_size
    for what, own, needed in (
        ("vocabulary", config.vocab_size, vocab_size), ("hidden size", config.hidden_size, hidden_size),
    ):  # fmt: skip
        if own != needed:
            raise InvalidConfig(
                f"drafter {name!r} was trained for a {what} of {own}, but verifier {verifier!r} has {needed}; a diffusion "
                "drafter fits one verifier (use drafter 'prompt-lookup' for any)"
            )
