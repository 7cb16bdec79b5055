"""The verifier's forward pass for Llama-shaped models, on layers written out (llama_layers.py).

transformers runs every model (transformers_forward.py); this runs one family with less between the matrices, and with
matrices laid out for 2 … 17 rows at a time, which is what speculation asks of a CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdiff_dist.errors import InvalidConfig, ModelUnavailable
from specdiff_dist.verifiers.device import INT4, pick_device, pick_dtype
from specdiff_dist.verifiers.folder import read_config, read_tensors, real_vocab_size
from specdiff_dist.verifiers.forward import Forwarded, ForwardPart
from specdiff_dist.verifiers.kernels import BlockLayers, BlockMatrix, has_block_layers, is_in_blocks, why_no_kernels
from specdiff_dist.verifiers.llama_layers import KVCache, LlamaLayers, LlamaShape, Weights, rope_of
from specdiff_dist.verifiers.packed_linear import make_linear

_ONE_MATRIX = "model.layers.0.self_attn.q_proj.weight"

log = logging.getLogger(__name__)


def plain_llama(raw: dict[str, Any]) -> LlamaShape | None:
    """The shape that a config.json describes; None when it describes anything that `LlamaForward` does not do: then
    transformers runs it."""
    rope = rope_of(raw)
    is_plain = (
        raw.get("model_type") == "llama"
        and rope.get("rope_type", rope.get("type", "default")) == "default"
        and rope.get("rope_theta") is not None
        and raw.get("hidden_act", "silu") == "silu"
        and not raw.get("attention_bias")
        and not raw.get("mlp_bias")
        and raw.get("pretraining_tp", 1) == 1
        and not raw.get("quantization_config")
    )
    if not is_plain:
        return None
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    return LlamaShape(
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        intermediate_size=raw["intermediate_size"],
        num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or hidden // heads,
        rms_norm_eps=raw["rms_norm_eps"],
        rope_theta=float(rope["rope_theta"]),
        max_position_embeddings=raw.get("max_position_embeddings") or 1 << 30,
    )


class LlamaForward:
    """A ModelForward (causal_lm.py) for what `plain_llama` accepts. Not thread-safe."""

    def __init__(
        self,
        shape: LlamaShape,
        weights: dict[str, Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        vocab_size: int | None = None,
        in_blocks: bool = False,
    ) -> None:
        """weights: by transformers' names. Raises ModelUnavailable when one is missing or has another shape than the
        config says. `vocab_size`: tokens of the real vocabulary; columns that only pad the output matrix are left out.
        `in_blocks`: the matrices are kept in the 4-bit blocks they are made of, everything else in `dtype`, float32;
        raises InvalidConfig when they are not made of such."""
        self.vocab_size = min(vocab_size or shape.vocab_size, shape.vocab_size)
        self.max_model_len = shape.max_position_embeddings
        self.dtype = INT4 if in_blocks else str(dtype).removeprefix("torch.")
        matrix = BlockMatrix.exact if in_blocks else make_linear
        self.num_layers, self.hidden_size = shape.num_hidden_layers, shape.hidden_size
        self._device, self.device_type = device, device.type
        self.kv_bytes_per_token = shape.kv_bytes(dtype)
        tensors = Weights(weights, owner="the verifier's", dtype=dtype, device=device)
        if in_blocks and has_block_layers(shape):
            self._layers = BlockLayers(shape, tensors, BlockMatrix.exact)
        else:
            self._layers = LlamaLayers(shape, tensors, matrix, dtype=dtype, device=device)
        self._embedding = tensors.take("model.embed_tokens.weight", shape.vocab_size, shape.hidden_size)
        is_tied = "lm_head.weight" not in weights
        output = self._embedding if is_tied else tensors.take("lm_head.weight", shape.vocab_size, shape.hidden_size)
        self._output = matrix(output[: self.vocab_size])

    @staticmethod
    def load(folder: Path, shape: LlamaShape, *, dtype: str = "auto", device: str = "auto") -> LlamaForward:
        """Loads a transformers folder. dtype: float32, bfloat16, int4, or auto: int4 on a CPU if the weights are 4-bit
        blocks (kernels/), else bfloat16. Raises InvalidConfig on another dtype, ModelUnavailable when the folder's
        weights cannot be read or are not those of its config."""
        where = pick_device(device)
        if dtype == INT4 and (missing := _why_no_int4(where)):
            raise InvalidConfig(f"int4 needs our CPU kernels: {missing}; or use bfloat16")
        torch_dtype = torch.float32 if dtype == INT4 else pick_dtype(dtype)
        weights = read_tensors(folder)
        if read_config(folder).get("tie_word_embeddings"):
            weights.pop("lm_head.weight", None)
        elif "lm_head.weight" not in weights:
            raise ModelUnavailable(f"{folder} has no lm_head.weight, and its config does not tie it to the embedding")
        vocab_size = real_vocab_size(folder)
        if dtype == INT4 or (dtype == "auto" and _runs_in_blocks(where, weights.get(_ONE_MATRIX))):
            try:
                return LlamaForward(
                    shape, weights, dtype=torch.float32, device=where, vocab_size=vocab_size, in_blocks=True
                )
            except InvalidConfig:  # one matrix is something else
                if dtype == INT4:
                    raise
        return LlamaForward(shape, weights, dtype=torch_dtype, device=where, vocab_size=vocab_size)

    def new_cache(self) -> KVCache:
        return self._layers.new_cache()

    def crop(self, cache: KVCache, length: int) -> None:
        """Cuts the cache to its first `length` tokens."""
        cache.crop(length)

    def copy_cache(self, cache: KVCache, length: int) -> KVCache:
        """Its first `length` tokens as a cache of their own."""
        return cache.head(length)

    @torch.inference_mode()
    def forward_parts(self, parts: Sequence[ForwardPart[KVCache]]) -> list[Forwarded]:
        """See ModelForward. On the model's device; features in its dtype."""
        layers = self._layers
        batch = layers.place([part.cache for part in parts], [part.num_tokens for part in parts], [0] * len(parts))
        ids = np.concatenate([part.token_ids for part in parts]).astype(np.int64)
        x = self._embedding[torch.from_numpy(ids).to(self._device)]
        x, hidden = layers.forward(batch, x, wanted={layer for part in parts for layer in part.feature_layers})
        batch.commit()

        ends = [span.first + span.num_rows for span in batch.spans]
        rows = [x[end - part.num_logits : end] for part, end in zip(parts, ends, strict=True)]
        counts = [part.num_logits for part in parts]
        logits = self._output(layers.final_norm(rows[0] if len(rows) == 1 else torch.cat(rows))).float()
        return [
            Forwarded(own, _side_by_side(hidden, part.feature_layers, slice(end - part.num_tokens, end)))
            for part, own, end in zip(parts, logits.split(counts), ends, strict=True)
        ]


def _why_no_int4(device: torch.device) -> str | None:
    return why_no_kernels() if device.type == "cpu" else f"they do not run on {device}"


def _runs_in_blocks(device: torch.device, one: Tensor | None) -> bool:
    """By one matrix: looking at all of them takes a second."""
    if device.type != "cpu" or one is None or one.dtype != torch.float32 or not is_in_blocks(one):
        return False
    if missing := why_no_kernels():
        log.warning("the verifier runs in bfloat16, several times slower than in its own 4-bit blocks: %s", missing)
        return False
    return True


def _side_by_side(hidden: dict[int, Tensor], layers: tuple[int, ...], rows: slice) -> Tensor | None:
    return torch.cat([hidden[layer][rows] for layer in layers], dim=-1) if layers else None
