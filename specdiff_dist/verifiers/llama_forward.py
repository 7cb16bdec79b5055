"""The verifier's forward pass for Llama-shaped models, on layers written out (llama_layers.py).

transformers runs every model (transformers_forward.py); this runs one family with less between the matrices, and with
matrices laid out for 2 … 17 rows at a time, which is what speculation asks of a CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdiff_dist.core.rows import IntArray
from specdiff_dist.errors import ModelUnavailable
from specdiff_dist.verifiers.device import pick_device, pick_dtype
from specdiff_dist.verifiers.folder import read_config, read_tensors, real_vocab_size
from specdiff_dist.verifiers.llama_layers import KVCache, LlamaLayers, LlamaShape, Weights, rope_of
from specdiff_dist.verifiers.packed_linear import make_linear


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
    ) -> None:
        """weights: by transformers' names. Raises ModelUnavailable when one is missing or has another shape than the
        config says. `vocab_size`: tokens of the real vocabulary; columns that only pad the output matrix are left out."""
        self.vocab_size = min(vocab_size or shape.vocab_size, shape.vocab_size)
        self.max_model_len = shape.max_position_embeddings
        self.dtype = str(dtype).removeprefix("torch.")
        self.num_layers, self.hidden_size = shape.num_hidden_layers, shape.hidden_size
        self._device = device
        tensors = Weights(weights, owner="the verifier's", dtype=dtype, device=device)
        self._layers = LlamaLayers(shape, tensors, make_linear, dtype=dtype, device=device)
        self._embedding = tensors.take("model.embed_tokens.weight", shape.vocab_size, shape.hidden_size)
        is_tied = "lm_head.weight" not in weights
        output = self._embedding if is_tied else tensors.take("lm_head.weight", shape.vocab_size, shape.hidden_size)
        self._output = make_linear(output[: self.vocab_size])

    @staticmethod
    def load(folder: Path, shape: LlamaShape, *, dtype: str = "auto", device: str = "auto") -> LlamaForward:
        """Loads a transformers folder. dtype: float32, bfloat16 or auto (bfloat16). Raises InvalidConfig on another
        dtype, ModelUnavailable when the folder's weights cannot be read or are not those of its config."""
        torch_dtype = pick_dtype(dtype)
        weights = read_tensors(folder)
        if read_config(folder).get("tie_word_embeddings"):
            weights.pop("lm_head.weight", None)
        elif "lm_head.weight" not in weights:
            raise ModelUnavailable(f"{folder} has no lm_head.weight, and its config does not tie it to the embedding")
        return LlamaForward(
            shape, weights, dtype=torch_dtype, device=pick_device(device), vocab_size=real_vocab_size(folder)
        )

    def new_cache(self) -> KVCache:
        return self._layers.new_cache()

    def crop(self, cache: KVCache, length: int) -> None:
        """Cuts the cache to its first `length` tokens."""
        cache.crop(length)

    @torch.inference_mode()
    def forward(
        self, cache: KVCache, token_ids: IntArray, num_logits: int, feature_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """See ModelForward. On the model's device; features in its dtype."""
        start, end = cache.length, cache.length + len(token_ids)
        cache.reserve(end)
        rotary, mask = self._layers.rotary(start, end), self._layers.mask(start, len(token_ids))
        ids = torch.from_numpy(np.ascontiguousarray(token_ids, np.int64)).to(self._device)
        x = self._embedding[ids]
        hidden: list[Tensor] = []
        for index in range(len(self._layers)):
            x = self._layers.run(index, cache, x, rotary, mask)
            if index in feature_layers:
                hidden.append(x)
        cache.length = end
        logits = self._output(self._layers.final_norm(x[-num_logits:])).float()
        return logits, torch.cat(hidden, dim=-1) if hidden else None
