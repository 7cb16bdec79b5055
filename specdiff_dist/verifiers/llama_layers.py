"""Llama's layers, written out: few, large operations on prepacked matrices. Verifier and drafter both run on them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from specdiff_dist.errors import ModelUnavailable
from specdiff_dist.verifiers.packed_linear import Linear

_FEWEST = 128  # tokens that a cache has room for when it has any


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Shape of a Llama-like network, under the names of its config.json."""

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

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """What a cached token takes."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * dtype.itemsize


def rope_of(raw: dict[str, Any]) -> dict[str, Any]:
    """The rotary embeddings of a config.json, in transformers' new spelling."""
    return raw.get("rope_parameters") or {"rope_theta": raw.get("rope_theta"), **(raw.get("rope_scaling") or {})}


class Weights:
    """Named tensors, checked as they are taken."""

    def __init__(self, tensors: dict[str, Tensor], *, owner: str, dtype: torch.dtype, device: torch.device) -> None:
        """owner: whose they are, for messages."""
        self._tensors, self._owner, self._dtype, self._device = tensors, owner, dtype, device

    def take(self, name: str, *size: int) -> Tensor:
        """One tensor. Raises ModelUnavailable when it is missing or has another shape."""
        tensor = self._tensors.get(name)
        if tensor is None or tuple(tensor.shape) != size:
            found = "missing" if tensor is None else f"of shape {tuple(tensor.shape)}"
            raise ModelUnavailable(f"{self._owner} weights: {name} is {found}, config.json wants {size}")
        return tensor.to(device=self._device, dtype=self._dtype)


class KVCache:
    """Keys and values of one session, [layers, kv heads, capacity, head_dim]; grows by half at a time."""

    def __init__(self, shape: LlamaShape, *, dtype: torch.dtype, device: torch.device) -> None:
        empty = (shape.num_hidden_layers, shape.num_key_value_heads, 0, shape.head_dim)
        self.keys = torch.zeros(empty, dtype=dtype, device=device)
        self.values = torch.zeros(empty, dtype=dtype, device=device)
        self.length = 0

    def reserve(self, length: int) -> None:
        """Makes room for `length` tokens."""
        capacity = self.capacity
        if length > capacity:
            capacity = max(length, capacity + capacity // 2, _FEWEST)
            self.keys, self.values = self._grown(self.keys, capacity), self._grown(self.values, capacity)

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return self.keys.shape[2]

    def crop(self, length: int) -> None:
        """Forgets all but the first `length` tokens."""
        self.length = min(self.length, length)

    def head(self, length: int) -> KVCache:
        """The first `length` tokens, in memory of its own and no more of it than they need."""
        head = copy(self)
        head.keys, head.values = self.keys[:, :, :length].clone(), self.values[:, :, :length].clone()
        head.length = length
        return head

    def _grown(self, old: Tensor, capacity: int) -> Tensor:
        new = old.new_zeros((*old.shape[:2], capacity, old.shape[3]))
        new[:, :, : self.length] = old[:, :, : self.length]
        return new


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """The rows that one cache adds in a forward: `num_causal` rows, then `num_block` that see everything."""

    cache: KVCache
    first: int  # row of the batch
    num_causal: int
    num_block: int

    @property
    def num_rows(self) -> int:
        return self.num_causal + self.num_block

    @property
    def end(self) -> int:
        """Tokens of the cache with these."""
        return self.cache.length + self.num_rows

    @property
    def block(self) -> slice:
        """The block's rows of the batch."""
        return slice(self.first + self.num_causal, self.first + self.num_rows)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The rows of one forward. Matrices see them all at once; attention goes span by span, so that no session is padded
    to another one's length."""

    spans: list[Span]

    def block_rows(self, x: Tensor) -> Tensor:
        """The rows of x [n, …] that belong to blocks."""
        rows = [x[span.block] for span in self.spans]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def commit(self) -> None:
        """Keeps the causal rows in their caches; the blocks' rows are forgotten."""
        for span in self.spans:
            span.cache.length += span.num_causal


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    attention_output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class LlamaLayers:
    """The layers and the final norm. Caches are the caller's: rows are written behind `cache.length`, which the caller
    moves."""

    def __init__(
        self,
        shape: LlamaShape,
        weights: Weights,
        matrix: Callable[[Tensor], Linear],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`matrix` makes a product of a weight; `dtype` is that of the activations. Raises ModelUnavailable."""
        self._shape, self._dtype, self._device = shape, dtype, device
        self._layers = [self._layer(weights, matrix, f"model.layers.{i}.") for i in range(shape.num_hidden_layers)]
        self._final_norm = weights.take("model.norm.weight", shape.hidden_size)
        self._eps = torch.tensor(shape.rms_norm_eps, device=device)
        self._cos_sin = self._rotary_table(256)

    def __len__(self) -> int:
        return len(self._layers)

    def new_cache(self) -> KVCache:
        return KVCache(self._shape, dtype=self._dtype, device=self._device)

    def place(self, caches: Sequence[KVCache], num_causal: Sequence[int], num_block: Sequence[int]) -> Batch:
        """Lays the new rows of several caches side by side: m causal rows each, then b rows that see everything. Makes room
        for them."""
        spans: list[Span] = []
        at = 0
        for cache, causal, block in zip(caches, num_causal, num_block, strict=True):
            cache.reserve(cache.length + causal + block)
            spans.append(Span(cache, at, causal, block))
            at += causal + block
        return Batch(spans)

    def forward(
        self, batch: Batch, x: Tensor, *, wanted: Collection[int] = (), block_only: bool = False
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """All layers over the batch's rows x [n, H], whose keys and values go into the caches (move their lengths by
        `batch.commit`). Returns the outputs of all rows, or of the blocks' rows alone (then every span has a block), and
        those [n, H] of the `wanted` layers."""
        rotary = [self.rotary(span.cache.length, span.end) for span in batch.spans]
        turns = torch.cat([cos for cos, _ in rotary]), torch.cat([sin for _, sin in rotary])
        masks = [self._mask(span.cache.length, span.num_causal, span.num_block) for span in batch.spans]
        hidden: dict[int, Tensor] = {}
        for index in range(len(self)):
            x = self._run(index, batch, x, turns, masks, block_only and index == len(self) - 1)
            if index in wanted:
                hidden[index] = x
        return x, hidden

    def rotary(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """cos and sin of positions start … end-1, for `rotate`; each [n, 1, head_dim]."""
        if end > len(self._cos_sin[0]):
            self._cos_sin = self._rotary_table(2 * end)
        cos, sin = self._cos_sin
        return cos[start:end, None], sin[start:end, None]

    def _mask(self, start: int, num_causal: int, num_block: int) -> Tensor | None:
        """[(m + b) * group, start + m + b], 0 where a query row may look, else -inf. None where all may look everywhere."""
        if num_causal == 0 or (num_causal == 1 and num_block == 0):
            return None
        end = start + num_causal + num_block
        group = self._shape.num_attention_heads // self._shape.num_key_value_heads
        hidden = torch.full((num_causal, end), -torch.inf, dtype=self._dtype, device=self._device).triu_(start + 1)
        hidden = torch.cat([hidden, hidden.new_zeros(num_block, end)])
        return hidden.repeat_interleave(group, 0)

    def _run(
        self,
        index: int,
        batch: Batch,
        x: Tensor,
        turns: tuple[Tensor, Tensor],
        masks: Sequence[Tensor | None],
        block_only: bool,
    ) -> Tensor:
        layer = self._layers[index]
        attended = self._attend(layer, index, batch, self.normed_for(index, x), turns, masks, block_only)
        # Of the last layer's causal rows only the keys and values are ever looked at.
        x = (batch.block_rows(x) if block_only else x) + attended
        gate, up = layer.gate_up(self._normed(x, layer.mlp_norm)).chunk(2, dim=-1)
        return x + layer.down(silu(gate).mul_(up))

    def normed_for(self, index: int, x: Tensor) -> Tensor:
        """What layer `index` makes its queries, keys and values from."""
        return self._normed(x, self._layers[index].input_norm)

    def final_norm(self, x: Tensor) -> Tensor:
        return self._normed(x, self._final_norm)

    def _attend(
        self,
        layer: _Layer,
        index: int,
        batch: Batch,
        x: Tensor,
        turns: tuple[Tensor, Tensor],
        masks: Sequence[Tensor | None],
        block_only: bool,
    ) -> Tensor:
        shape = self._shape
        kv_heads, group = shape.num_key_value_heads, shape.num_attention_heads // shape.num_key_value_heads
        qkv = layer.qkv(x).view(len(x), -1, shape.head_dim)
        rotated = rotate(qkv[:, : (group + 1) * kv_heads], *turns)
        values = qkv[:, (group + 1) * kv_heads :]
        attended: list[Tensor] = []
        for span, mask in zip(batch.spans, masks, strict=True):
            cache, rows, end = span.cache, slice(span.first, span.first + span.num_rows), span.end
            cache.keys[index, :, cache.length : end] = rotated[rows, group * kv_heads :].transpose(0, 1)
            cache.values[index, :, cache.length : end] = values[rows].transpose(0, 1)
            # Query heads that share a key head become further query rows: one attention per key head, nothing repeated.
            skipped = span.num_causal if block_only else 0
            num_queries = span.num_rows - skipped
            query = rotated[span.first + skipped : rows.stop, : group * kv_heads]
            query = query.view(num_queries, kv_heads, group, shape.head_dim).transpose(0, 1)
            out = scaled_dot_product_attention(
                query.reshape(1, kv_heads, num_queries * group, shape.head_dim),
                cache.keys[None, index, :, :end], cache.values[None, index, :, :end],
                attn_mask=None if skipped else mask,
            )  # fmt: skip
            attended.append(out.view(kv_heads, num_queries, -1).transpose(0, 1).reshape(num_queries, -1))
        return layer.attention_output(attended[0] if len(attended) == 1 else torch.cat(attended))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return rms_norm(x, weight.shape, weight, self._shape.rms_norm_eps)
        # The same in half the operators: at a few rows a step costs as much for their number as for the arithmetic.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, norm, norm, value=1 / self._shape.hidden_size).rsqrt_()
        return (x * scale).mul_(weight)

    def _layer(self, weights: Weights, matrix: Callable[[Tensor], Linear], at: str) -> _Layer:
        shape, take = self._shape, weights.take
        hidden, inner = shape.hidden_size, shape.intermediate_size
        q_size = shape.num_attention_heads * shape.head_dim
        kv_size = shape.num_key_value_heads * shape.head_dim
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

    def _rotary_table(self, length: int) -> tuple[Tensor, Tensor]:
        half = torch.arange(0, self._shape.head_dim, 2, dtype=torch.float32) / self._shape.head_dim
        angles = torch.outer(torch.arange(length, dtype=torch.float32), self._shape.rope_theta**-half)
        cos, sin = angles.cos(), angles.sin()
        pairs = (torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1))
        return pairs[0].to(self._device, self._dtype), pairs[1].to(self._device, self._dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [rows, heads, head_dim]; cos, sin: [rows, 1, head_dim], the first half of sin negated."""
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat([second, first], dim=-1), sin)
