"""The verifier's forward pass for Llama-shaped models, written out: few, large operations on prepacked matrices.

transformers runs every model (transformers_forward.py); this runs one family with less between the matrices, and with
matrices laid out for 2 … 17 rows at a time, which is what speculation asks of a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from specdiff_dist.core.rows import IntArray
from specdiff_dist.errors import InvalidConfig, ModelUnavailable
from specdiff_dist.verifiers.device import pick_device
from specdiff_dist.verifiers.folder import read_config, read_tensors, real_vocab_size
from specdiff_dist.verifiers.packed_linear import Linear, make_linear

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """What config.json says about a Llama-shaped network."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_positions: int

    @staticmethod
    def of(raw: dict[str, Any]) -> LlamaShape | None:
        """None when the config describes anything that `LlamaForward` does not do: then transformers runs it."""
        rope = raw.get("rope_parameters") or {"rope_theta": raw.get("rope_theta"), **(raw.get("rope_scaling") or {})}
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
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or hidden // heads,
            norm_eps=raw["rms_norm_eps"],
            rope_theta=float(rope["rope_theta"]),
            max_positions=raw.get("max_position_embeddings") or 1 << 30,
        )


class LlamaCache:
    """Keys and values of one session, [layers, kv heads, capacity, head_dim]; grows by half at a time."""

    def __init__(self, shape: LlamaShape, *, dtype: torch.dtype, device: torch.device) -> None:
        empty = (shape.num_layers, shape.num_kv_heads, 0, shape.head_dim)
        self.keys = torch.zeros(empty, dtype=dtype, device=device)
        self.values = torch.zeros(empty, dtype=dtype, device=device)
        self.length = 0

    def reserve(self, length: int) -> None:
        """Makes room for `length` tokens."""
        capacity = self.keys.shape[2]
        if length > capacity:
            capacity = max(length, capacity + capacity // 2, 128)
            self.keys, self.values = self._grown(self.keys, capacity), self._grown(self.values, capacity)

    def _grown(self, old: Tensor, capacity: int) -> Tensor:
        new = old.new_zeros((*old.shape[:2], capacity, old.shape[3]))
        new[:, :, : self.length] = old[:, :, : self.length]
        return new


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    attention_output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class LlamaForward:
    """A ModelForward (causal_lm.py) for what `LlamaShape.of` accepts. Not thread-safe."""

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
        self._shape, self._device, self._dtype = shape, device, dtype
        self.vocab_size = min(vocab_size or shape.vocab_size, shape.vocab_size)
        self.max_model_len = shape.max_positions
        self.dtype = str(dtype).removeprefix("torch.")
        hidden, inner = shape.hidden_size, shape.intermediate_size
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

        def take(name: str, *size: int) -> Tensor:
            tensor = weights.get(name)
            if tensor is None or tuple(tensor.shape) != size:
                found = "missing" if tensor is None else f"of shape {tuple(tensor.shape)}"
                raise ModelUnavailable(f"the verifier's weights: {name} is {found}, config.json wants {size}")
            return tensor.to(device=device, dtype=dtype)

        def layer(at: str) -> _Layer:
            qkv = [
                take(f"{at}self_attn.{name}_proj.weight", size, hidden)
                for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size))
            ]
            return _Layer(
                input_norm=take(f"{at}input_layernorm.weight", hidden),
                qkv=make_linear(torch.cat(qkv)),
                attention_output=make_linear(take(f"{at}self_attn.o_proj.weight", hidden, q_size)),
                mlp_norm=take(f"{at}post_attention_layernorm.weight", hidden),
                gate_up=make_linear(
                    torch.cat([take(f"{at}mlp.{name}_proj.weight", inner, hidden) for name in ("gate", "up")])
                ),
                down=make_linear(take(f"{at}mlp.down_proj.weight", hidden, inner)),
            )

        self._layers = [layer(f"model.layers.{index}.") for index in range(shape.num_layers)]
        self._norm = take("model.norm.weight", hidden)
        self._embedding = take("model.embed_tokens.weight", shape.vocab_size, hidden)
        is_tied = "lm_head.weight" not in weights
        output = self._embedding if is_tied else take("lm_head.weight", shape.vocab_size, hidden)
        self._output = make_linear(output[: self.vocab_size])
        self._cos_sin = self._rotary_table(1024)

    @staticmethod
    def load(folder: Path, shape: LlamaShape, *, dtype: str = "auto", device: str = "auto") -> LlamaForward:
        """Loads a transformers folder. dtype: float32, bfloat16 or auto (bfloat16). Raises InvalidConfig on another
        dtype, ModelUnavailable when the folder's weights cannot be read or are not those of its config."""
        if dtype != "auto" and dtype not in _DTYPES:
            raise InvalidConfig(f"verifier dtype must be auto, {' or '.join(_DTYPES)}, not {dtype!r}")
        weights = read_tensors(folder)
        if read_config(folder).get("tie_word_embeddings"):
            weights.pop("lm_head.weight", None)
        elif "lm_head.weight" not in weights:
            raise ModelUnavailable(f"{folder} has no lm_head.weight, and its config does not tie it to the embedding")
        return LlamaForward(
            shape,
            weights,
            dtype=_DTYPES.get(dtype, torch.bfloat16),
            device=pick_device(device),
            vocab_size=real_vocab_size(folder),
        )

    def new_cache(self) -> LlamaCache:
        return LlamaCache(self._shape, dtype=self._dtype, device=self._device)

    def crop(self, cache: LlamaCache, length: int) -> None:
        """Cuts the cache to its first `length` tokens."""
        cache.length = min(cache.length, length)

    @torch.inference_mode()
    def forward(self, cache: LlamaCache, token_ids: IntArray, num_logits: int) -> Tensor:
        """Appends `token_ids` [t ≥ 1] to the cache. Returns the last `num_logits` ≥ 1 logits, float32 [num_logits, V]
        on the model's device. The cache is unusable if this raises."""
        start, num_rows = cache.length, len(token_ids)
        end = start + num_rows
        cache.reserve(end)
        if end > len(self._cos_sin[0]):
            self._cos_sin = self._rotary_table(2 * end)
        cos, sin = (table[start:end, None] for table in self._cos_sin)
        mask = self._attention_mask(start, num_rows)
        eps, size = self._shape.norm_eps, (self._shape.hidden_size,)

        ids = torch.from_numpy(np.ascontiguousarray(token_ids, np.int64)).to(self._device)
        x = self._embedding[ids]
        for index, layer in enumerate(self._layers):
            x = x + self._attend(layer, cache, index, rms_norm(x, size, layer.input_norm, eps), cos, sin, mask)
            gate, up = layer.gate_up(rms_norm(x, size, layer.mlp_norm, eps)).chunk(2, dim=-1)
            x = x + layer.down(silu(gate) * up)
        cache.length = end
        return self._output(rms_norm(x[-num_logits:], size, self._norm, eps)).float()

    def _attend(
        self, layer: _Layer, cache: LlamaCache, index: int, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None
    ) -> Tensor:
        shape, num_rows = self._shape, len(x)
        kv_heads, group = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads
        qkv = layer.qkv(x).view(num_rows, -1, shape.head_dim)
        rotated = _rotate(qkv[:, : (group + 1) * kv_heads], cos, sin)
        end = cache.length + num_rows
        cache.keys[index, :, cache.length : end] = rotated[:, group * kv_heads :].transpose(0, 1)
        cache.values[index, :, cache.length : end] = qkv[:, (group + 1) * kv_heads :].transpose(0, 1)
        # Query heads that share a key head become further query rows: one attention per key head, nothing repeated.
        query = rotated[:, : group * kv_heads].view(num_rows, kv_heads, group, shape.head_dim)
        query = query.permute(1, 2, 0, 3).reshape(1, kv_heads, group * num_rows, shape.head_dim)
        attended = scaled_dot_product_attention(
            query, cache.keys[None, index, :, :end], cache.values[None, index, :, :end], attn_mask=mask
        )
        attended = attended.view(kv_heads, group, num_rows, shape.head_dim).permute(2, 0, 1, 3)
        return layer.attention_output(attended.reshape(num_rows, -1))

    def _attention_mask(self, start: int, num_rows: int) -> Tensor | None:
        """bool [group * n, start + n], true where a query row (see `_attend`) may look; None where all may everywhere."""
        if num_rows == 1:
            return None
        columns = torch.arange(start + num_rows, device=self._device)
        rows = torch.arange(start, start + num_rows, device=self._device)
        return (columns <= rows[:, None]).repeat(self._shape.num_heads // self._shape.num_kv_heads, 1)

    def _rotary_table(self, length: int) -> tuple[Tensor, Tensor]:
        half = torch.arange(0, self._shape.head_dim, 2, dtype=torch.float32) / self._shape.head_dim
        angles = torch.outer(torch.arange(length, dtype=torch.float32), self._shape.rope_theta**-half)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(self._device, self._dtype), angles.sin().to(self._device, self._dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [rows, heads, head_dim]; cos, sin: [rows, 1, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
