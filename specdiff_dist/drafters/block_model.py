"""The draft network: a small Llama body whose last positions form a masked block that sees itself in both directions.

Inputs: committed tokens, causal, KV-cached; then a block [anchor, token or mask, …]. A block position sees the whole
prefix and the whole block; the output at block position j is about the token *after* it. Block rows are never kept in
the cache, so a cached row depends on committed tokens to its left alone and stays valid whatever is rejected later.

A drafter with `feature_layers` has no causal stream: the keys and values of committed tokens are made from the verifier's
hidden states of them (features), which cost two small projections a layer. Each of the F hidden states is normed on its
own; a layer's input is then the one it is closest to in depth plus a learned fusion of all, normed and projected by the
layer itself, at the token's position. With a fusion of zeros those are the keys and values that the verifier's own layer
has there, which is what training starts from.

A drafter may carry `draft_vocab`: the token ids it proposes. Its output matrix is then those rows of the verifier's alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from specdiff_dist.drafters.linear import int8_linear
from specdiff_dist.errors import InvalidConfig, ModelUnavailable
from specdiff_dist.verifiers.folder import read_config
from specdiff_dist.verifiers.packed_linear import Linear, make_linear

MASK_ID = -1  # input id of a masked position


@dataclass(frozen=True, slots=True)
class BlockModelConfig:
    """Shape of the network; read from the config.json of a drafter folder (Llama's keys)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    max_block_size: int = 16  # longest block seen in training
    feature_layers: tuple[int, ...] = ()  # verifier layers whose outputs stand for committed tokens; (): none needed
    feature_sources: tuple[int, ...] = ()  # [layers] which of them each layer starts from; -1: the token's embedding

    def __post_init__(self) -> None:
        layers, sources = self.feature_layers, self.feature_sources
        if list(layers) != sorted(set(layers)) or any(layer < 0 for layer in layers):
            raise InvalidConfig(f"feature_layers must ascend from 0, not {list(layers)}")
        is_right = all(-1 <= source < len(layers) for source in sources)
        if len(sources) != (self.num_hidden_layers if layers else 0) or not is_right:
            raise InvalidConfig(
                f"feature_sources must be one of -1 … {len(layers) - 1} for each layer, not {list(sources)}"
            )

    @property
    def feature_size(self) -> int:
        """Numbers that a token's features have, F · H."""
        return len(self.feature_layers) * self.hidden_size

    @staticmethod
    def read(folder: Path) -> BlockModelConfig:
        """Raises ModelUnavailable when the file cannot be read, InvalidConfig when it describes something else."""
        path, raw = folder / "config.json", read_config(folder)
        rope = raw.get("rope_parameters") or {"rope_theta": raw.get("rope_theta"), **(raw.get("rope_scaling") or {})}
        if rope.get("rope_type", "default") != "default" or raw.get("hidden_act", "silu") != "silu":
            raise InvalidConfig(f"{path}: a block diffusion drafter has default rotary embeddings and silu")
        if raw.get("attention_bias") or raw.get("mlp_bias"):
            raise InvalidConfig(f"{path}: a block diffusion drafter has no biases")
        try:
            return BlockModelConfig(
                vocab_size=raw["vocab_size"],
                hidden_size=raw["hidden_size"],
                intermediate_size=raw["intermediate_size"],
                num_hidden_layers=raw["num_hidden_layers"],
                num_attention_heads=raw["num_attention_heads"],
                num_key_value_heads=raw["num_key_value_heads"],
                head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
                rms_norm_eps=raw["rms_norm_eps"],
                rope_theta=float(rope["rope_theta"]),
                max_position_embeddings=raw["max_position_embeddings"],
                max_block_size=raw.get("max_block_size", 16),
                feature_layers=tuple(raw.get("feature_layers", ())),
                feature_sources=tuple(raw.get("feature_sources", ())),
            )
        except (KeyError, TypeError) as error:
            raise InvalidConfig(f"{path} lacks {error}; is it the config of a block diffusion drafter?") from error


class BlockCache:
    """Keys and values of one session's committed tokens, [layers, kv heads, capacity, head_dim]; grows by doubling."""

    def __init__(self, config: BlockModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.num_hidden_layers, config.num_key_value_heads, 0, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.length = 0

    def reserve(self, length: int) -> None:
        """Makes room for `length` tokens."""
        capacity = self.keys.shape[2]
        if length > capacity:
            self.keys = self._grown(self.keys, max(length, 2 * capacity, 64))
            self.values = self._grown(self.values, max(length, 2 * capacity, 64))

    def crop(self, length: int) -> None:
        """Forgets all but the first `length` tokens."""
        self.length = min(self.length, length)

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


class BlockModel:
    """The network with its weights. Not thread-safe. `dtype`: torch.float32, torch.bfloat16 or torch.qint8 (int8 matrices
    with float32 activations, CPU only)."""

    def __init__(
        self,
        config: BlockModelConfig,
        weights: dict[str, Tensor],
        embedding: Tensor,
        output: Tensor,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """weights: the tensors of drafter.safetensors; embedding, output: the verifier's [V, H]. Raises ModelUnavailable
        when a tensor is missing or has another shape than `config` says, InvalidConfig when `draft_vocab` is no ascending
        list of token ids."""
        self.config, self.device = config, device
        self.dtype = torch.float32 if dtype == torch.qint8 else dtype
        matrix = int8_linear if dtype == torch.qint8 else make_linear
        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads

        def take(name: str, *shape: int) -> Tensor:
            tensor = weights.get(name)
            if tensor is None or tuple(tensor.shape) != shape:
                found = "missing" if tensor is None else f"of shape {tuple(tensor.shape)}"
                raise ModelUnavailable(f"drafter weights: {name} is {found}, config.json wants {shape}")
            return tensor.to(device=device, dtype=self.dtype)

        def layer(index: int) -> _Layer:
            at = f"model.layers.{index}."
            q_size, kv_size, inner = heads * config.head_dim, kv_heads * config.head_dim, config.intermediate_size
            qkv = [
                take(f"{at}self_attn.{name}_proj.weight", size, hidden)
                for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size))
            ]
            gate_up = [take(f"{at}mlp.{name}_proj.weight", inner, hidden) for name in ("gate", "up")]
            return _Layer(
                input_norm=take(f"{at}input_layernorm.weight", hidden),
                qkv=matrix(torch.cat(qkv)),
                attention_output=matrix(take(f"{at}self_attn.o_proj.weight", hidden, q_size)),
                mlp_norm=take(f"{at}post_attention_layernorm.weight", hidden),
                gate_up=matrix(torch.cat(gate_up)),
                down=matrix(take(f"{at}mlp.down_proj.weight", hidden, inner)),
            )

        self._layers = [layer(index) for index in range(config.num_hidden_layers)]
        self._norm = take("model.norm.weight", hidden)
        self._mask_embedding = take("mask_embedding", hidden)
        if config.feature_layers:
            self._feature_norm = take("feature_norm.weight", config.feature_size)
            # In floating point also in an int8 drafter: one scale for numbers so uneven would leave nothing of most.
            self._fusion = make_linear(take("feature_fusion.weight", hidden, config.feature_size))
            self._feature_kv = [
                matrix(torch.cat([take(f"model.layers.{index}.self_attn.{name}_proj.weight",
                                       kv_heads * config.head_dim, hidden) for name in ("k", "v")]))
                for index in range(config.num_hidden_layers)
            ]  # fmt: skip
        # Looked up a few rows at a time: half precision is kept for the table even where the arithmetic is float32.
        self._embedding = embedding.to(device=device, dtype=torch.bfloat16 if dtype == torch.qint8 else self.dtype)
        self.draft_vocab = _draft_vocab(weights.get("draft_vocab"), config.vocab_size, device)
        rows = output if self.draft_vocab is None else output[self.draft_vocab.to(output.device)]
        self._output = matrix(rows.to(device=device, dtype=self.dtype))
        self._eps = torch.tensor(config.rms_norm_eps, device=device)
        self._cos_sin = self._rotary_table(256)

    def new_cache(self) -> BlockCache:
        return BlockCache(self.config, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def forward(self, cache: BlockCache, causal_ids: Tensor, block_ids: Tensor) -> Tensor:
        """One pass over committed tokens (kept in the cache) and a block (not kept); either may be empty.

        Args:
            causal_ids: int64 [m]; block_ids: int64 [b], MASK_ID for masked positions; the block follows the m tokens.

        Returns the normed hidden states of the block positions, [b, H].
        """
        start, num_causal, num_block = cache.length, len(causal_ids), len(block_ids)
        end = start + num_causal + num_block
        cache.reserve(end)
        if end > len(self._cos_sin[0]):
            self._cos_sin = self._rotary_table(2 * end)
        cos, sin = (table[start:end, None] for table in self._cos_sin)
        mask = self._attention_mask(start, num_causal, num_block)

        x = self._embed(torch.cat([causal_ids, block_ids]))
        for index, layer in enumerate(self._layers):
            # Of the last layer's causal rows only the keys and values are ever looked at.
            first = num_causal if num_block and index == len(self._layers) - 1 else 0
            attended = self._attend(layer, cache, index, self._normed(x, layer.input_norm), cos, sin, mask, first)
            x = x[first:] + attended
            gate, up = layer.gate_up(self._normed(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = x + layer.down(silu(gate).mul_(up))
        cache.length = start + num_causal
        return self._normed(x[len(x) - num_block :], self._norm)

    @torch.inference_mode()
    def remember(self, cache: BlockCache, token_ids: Tensor, features: Tensor) -> None:
        """Adds committed tokens to the cache by their features. token_ids: int64 [m]; features: [m, F · H], any float dtype."""
        config, start, end = self.config, cache.length, cache.length + len(token_ids)
        if start == end:
            return
        cache.reserve(end)
        if end > len(self._cos_sin[0]):
            self._cos_sin = self._rotary_table(2 * end)
        cos, sin = (table[start:end, None] for table in self._cos_sin)
        num_features, hidden, kv_heads = len(config.feature_layers), config.hidden_size, config.num_key_value_heads
        normed = self._unit(features.to(self.device, torch.float32).view(-1, num_features, hidden)).to(self.dtype)
        normed = normed.mul_(self._feature_norm.view(num_features, hidden))
        fused = self._fusion(normed.flatten(1))
        embedded = self._embed(token_ids) if -1 in config.feature_sources else fused
        for index, (layer, source) in enumerate(zip(self._layers, config.feature_sources, strict=True)):
            x = fused + (embedded if source < 0 else normed[:, source])
            key, value = self._feature_kv[index](self._normed(x, layer.input_norm)).view(
                len(x), 2, kv_heads, config.head_dim
            ).unbind(1)  # fmt: skip
            cache.keys[index, :, start:end] = _rotate(key, cos, sin).transpose(0, 1)
            cache.values[index, :, start:end] = value.transpose(0, 1)
        cache.length = end

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [k, V] for hidden states [k, H]; with a `draft_vocab` [Vd], column j is about token draft_vocab[j]."""
        return self._output(hidden).float()

    def num_columns(self, vocab_size: int) -> int:
        """How many leading columns of `logits` are about token ids < vocab_size."""
        if self.draft_vocab is None:
            return min(vocab_size, self.config.vocab_size)
        return int((self.draft_vocab < vocab_size).sum())

    def _attend(
        self,
        layer: _Layer,
        cache: BlockCache,
        index: int,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        first: int,
    ) -> Tensor:
        """Attention of the rows from `first` on; the keys and values of all rows go into the cache."""
        config, num_rows = self.config, len(x)
        kv_heads, group = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
        qkv = layer.qkv(x).view(num_rows, -1, config.head_dim)
        rotated = _rotate(qkv[:, : (group + 1) * kv_heads], cos, sin)
        end = cache.length + num_rows
        cache.keys[index, :, cache.length : end] = rotated[:, group * kv_heads :].transpose(0, 1)
        cache.values[index, :, cache.length : end] = qkv[:, (group + 1) * kv_heads :].transpose(0, 1)
        # Query heads that share a key head become further query rows: one attention per key head, nothing repeated.
        num_queries = num_rows - first
        query = rotated[first:, : group * kv_heads].view(num_queries, kv_heads, group, config.head_dim)
        query = query.transpose(0, 1).reshape(1, kv_heads, num_queries * group, config.head_dim)
        attended = scaled_dot_product_attention(
            query, cache.keys[None, index, :, :end], cache.values[None, index, :, :end],
            attn_mask=None if mask is None or first else mask,
        )  # fmt: skip
        attended = attended.view(kv_heads, num_queries, -1).transpose(0, 1)
        return layer.attention_output(attended.reshape(num_queries, -1))

    def _attention_mask(self, start: int, num_causal: int, num_block: int) -> Tensor | None:
        """[(m + b) * group, start + m + b], 0 where a query row (see `_attend`) may look, else -inf; None where all may
        look everywhere."""
        if num_causal == 0 or (num_causal == 1 and num_block == 0):
            return None
        end = start + num_causal + num_block
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        hidden = torch.full((num_causal, end), -torch.inf, dtype=self.dtype, device=self.device).triu_(start + 1)
        hidden = torch.cat([hidden, hidden.new_zeros(num_block, end)])
        return hidden.repeat_interleave(group, 0)

    def _embed(self, ids: Tensor) -> Tensor:
        rows = self._embedding[ids.clamp(min=0)].to(self.dtype)
        return torch.where((ids == MASK_ID)[:, None], self._mask_embedding, rows)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return rms_norm(x, (self.config.hidden_size,), weight, self.config.rms_norm_eps)
        # The same in half the operators: at a few rows a step costs as much for their number as for the arithmetic.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, norm, norm, value=1 / self.config.hidden_size).rsqrt_()
        return (x * scale).mul_(weight)

    def _unit(self, x: Tensor) -> Tensor:
        return rms_norm(x, (self.config.hidden_size,), eps=self.config.rms_norm_eps)

    def _rotary_table(self, length: int) -> tuple[Tensor, ...]:
        half = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32) / self.config.head_dim
        angles = torch.outer(torch.arange(length, dtype=torch.float32), self.config.rope_theta**-half)
        cos, sin = angles.cos(), angles.sin()
        return tuple(torch.cat(pair, dim=-1).to(self.device, self.dtype) for pair in ((cos, cos), (-sin, sin)))


def _draft_vocab(ids: Tensor | None, vocab_size: int, device: torch.device) -> Tensor | None:
    """int64 [Vd], checked."""
    if ids is None:
        return None
    if ids.ndim != 1 or len(ids) == 0 or ids.is_floating_point():
        raise InvalidConfig(f"draft_vocab must be a list of token ids, not {ids.dtype} of shape {tuple(ids.shape)}")
    ids = ids.to(device=device, dtype=torch.int64)
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size or not bool((ids[1:] > ids[:-1]).all()):
        raise InvalidConfig(f"draft_vocab must be ascending token ids 0 … {vocab_size - 1}; export the drafter again")
    return ids


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [rows, heads, head_dim]; cos, sin: [rows, 1, head_dim], the first half of sin negated."""
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat([second, first], dim=-1), sin)
