"""The draft network as it is trained: `drafters.BlockModel` over many blocks of many answers at once.

Matrix products are what training costs, so nothing is computed that no loss looks at: one pass over a prefix serves all
blocks after it, of the last layer's prefix only keys and values are made, and of the last layer's block positions only
those with a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from specdiff_dist.drafters.block_model import MASK_ID, BlockModelConfig
from specdiff_dist.errors import InvalidConfig
from specdiff_dist.train.blocks import BlockBatch


class DraftNetwork(nn.Module):
    """Parameters are named as in drafter.safetensors; embedding and output matrix are the verifier's and frozen."""

    def __init__(
        self,
        config: BlockModelConfig,
        embedding_table: Tensor,
        output: Tensor,
        draft_vocab: Tensor | None = None,
        *,
        trains_prefix: bool = True,
    ) -> None:
        """embedding_table, output: the verifier's [V, H]. draft_vocab: int64 [Vd], ascending; None for all tokens.

        trains_prefix: whether gradients pass through the prefix; without, it costs a third, and of it only the making of
        keys and values is trained.
        """
        super().__init__()
        self.config, self.trains_prefix = config, trains_prefix
        self.model = _Body(config)
        self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size))
        if config.feature_layers:
            self.feature_norm = _FeatureNorm(config)
            self.feature_fusion = nn.Linear(config.feature_size, config.hidden_size, bias=False)
            nn.init.zeros_(self.feature_fusion.weight)
        rows = output if draft_vocab is None else output[draft_vocab]
        self.register_buffer("embedding_table", embedding_table.detach().float().clone(), persistent=False)
        self.register_buffer("output", rows.detach().float().clone(), persistent=False)
        self.register_buffer("draft_vocab", draft_vocab, persistent=False)
        self.register_buffer("_cos", torch.zeros(0, config.head_dim), persistent=False)
        self.register_buffer("_sin", torch.zeros(0, config.head_dim), persistent=False)
        self.embedding_table: Tensor
        self.output: Tensor
        self.draft_vocab: Tensor | None

    def forward(self, batch: BlockBatch) -> Tensor:
        """Logits [P, Vd] of the wanted positions."""
        return linear(self.hidden(batch), self.output)

    def hidden(self, batch: BlockBatch) -> Tensor:
        """Normed hidden states [P, H] of the wanted positions."""
        self._reserve_rotary(int(batch.anchors.max()) + batch.block_size)
        positions = torch.cat([torch.arange(b - a) for a, b in pairwise(batch.prefix_splits)])
        rotary = self._rotary(positions.to(batch.prefix_ids.device))
        if self.config.feature_layers:
            prefix = self._featured_prefix(batch)
        else:
            with torch.set_grad_enabled(self.trains_prefix and torch.is_grad_enabled()):
                prefix = self._prefix(batch, rotary)
        return self._blocks(batch, prefix, rotary)

    def _featured_prefix(self, batch: BlockBatch) -> list[Tensor]:
        """As `_prefix`, from the verifier's features: see drafters.BlockModel.remember."""
        if batch.prefix_features is None:
            raise InvalidConfig("this network needs features of the prefixes; make batches with a FeatureStore")
        normed = self.feature_norm(batch.prefix_features.to(self.output.dtype))
        fused = self.feature_fusion(normed.flatten(1))
        embedded = self._embed(batch.prefix_ids) if -1 in self.config.feature_sources else fused
        return [
            layer.input_layernorm(fused + (embedded if source < 0 else normed[:, source]))
            for layer, source in zip(self.model.each_layer(), self.config.feature_sources, strict=True)
        ]

    def _prefix(self, batch: BlockBatch, rotary: tuple[Tensor, ...]) -> list[Tensor]:
        """The causal pass: what each layer makes its prefix keys and values from, normed, [C, H]."""
        x = self._embed(batch.prefix_ids)
        normed = []
        for index, layer in enumerate(self.model.each_layer()):
            y = layer.input_layernorm(x)
            normed.append(y)
            if index == self.config.num_hidden_layers - 1:
                break
            query, (key, value) = layer.self_attn.query(y, rotary), layer.self_attn.key_value(y, rotary)
            attended = [
                _attend_causally(query[a:b], key[a:b], value[a:b]) for a, b in pairwise(batch.prefix_splits) if b > a
            ]
            x = x + layer.self_attn.o_proj(torch.cat(attended))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return normed

    def _blocks(self, batch: BlockBatch, prefix: Sequence[Tensor], prefix_rotary: tuple[Tensor, ...]) -> Tensor:
        size, device = batch.block_size, batch.block_ids.device
        rotary = self._rotary((batch.anchors[:, None] + torch.arange(size, device=device)).flatten())
        spans = [
            (slice(a, b), slice(c * size, d * size))
            for (a, b), (c, d) in zip(pairwise(batch.prefix_splits), pairwise(batch.block_splits), strict=True)
        ]  # prefix rows and block rows of each answer
        biases = [
            _hidden_bias(batch.anchors[slice(*blocks)], b - a)
            for (a, b), blocks in zip(pairwise(batch.prefix_splits), pairwise(batch.block_splits), strict=True)
        ]
        x = self._embed(batch.block_ids.flatten())
        for index, layer in enumerate(self.model.each_layer()):
            attention = layer.self_attn
            y = layer.input_layernorm(x)
            query, (key, value) = attention.query(y, rotary), attention.key_value(y, rotary)
            seen_key, seen_value = attention.key_value(prefix[index], prefix_rotary)
            attended = torch.cat([
                _attend_blocks(query[own], (seen_key[seen], seen_value[seen]), (key[own], value[own]), bias, size)
                for (seen, own), bias in zip(spans, biases, strict=True)
            ])  # fmt: skip
            if index == self.config.num_hidden_layers - 1:
                x, attended = x[batch.wanted], attended[batch.wanted]
            x = x + attention.o_proj(attended)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.norm(x)

    def _embed(self, ids: Tensor) -> Tensor:
        rows = embedding(ids.clamp(min=0), self.embedding_table)
        return torch.where((ids == MASK_ID)[:, None], self.mask_embedding, rows)

    def _rotary(self, positions: Tensor) -> tuple[Tensor, ...]:
        return self._cos[positions, None], self._sin[positions, None]

    def _reserve_rotary(self, length: int) -> None:
        if length <= len(self._cos):
            return
        half = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32) / self.config.head_dim
        angles = torch.outer(torch.arange(2 * length, dtype=torch.float32), self.config.rope_theta**-half)
        cos, sin = angles.cos(), angles.sin()
        device = self.embedding_table.device
        self._cos, self._sin = torch.cat([cos, cos], dim=-1).to(device), torch.cat([-sin, sin], dim=-1).to(device)


class _Body(nn.Module):
    def __init__(self, config: BlockModelConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = _Norm(config)

    def each_layer(self) -> list[_Layer]:
        return [layer for layer in self.layers if isinstance(layer, _Layer)]


class _Layer(nn.Module):
    def __init__(self, config: BlockModelConfig) -> None:
        super().__init__()
        self.input_layernorm = _Norm(config)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = _Norm(config)
        self.mlp = _Mlp(config)


class _Norm(nn.Module):
    def __init__(self, config: BlockModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self._eps = config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self._eps)


class _FeatureNorm(nn.Module):
    """Each of the F hidden states on its own: [rows, F · H] to [rows, F, H]."""

    def __init__(self, config: BlockModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.feature_size))
        self._shape, self._eps = (len(config.feature_layers), config.hidden_size), config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.view(-1, *self._shape), self._shape[1:], eps=self._eps) * self.weight.view(self._shape)


class _Attention(nn.Module):
    def __init__(self, config: BlockModelConfig) -> None:
        super().__init__()
        self._heads, self._kv_heads, self._head_dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim,
        )  # fmt: skip
        hidden, q_size, kv_size = config.hidden_size, self._heads * self._head_dim, self._kv_heads * self._head_dim
        self.q_proj = nn.Linear(hidden, q_size, bias=False)
        self.k_proj = nn.Linear(hidden, kv_size, bias=False)
        self.v_proj = nn.Linear(hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, hidden, bias=False)

    def query(self, x: Tensor, rotary: tuple[Tensor, ...]) -> Tensor:
        """[rows, kv heads, query heads of each, head_dim]."""
        rotated = _rotate(self.q_proj(x).view(len(x), self._heads, self._head_dim), rotary)
        return rotated.view(len(x), self._kv_heads, -1, self._head_dim)

    def key_value(self, x: Tensor, rotary: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Two of [rows, kv heads, head_dim]."""
        shape = (len(x), self._kv_heads, self._head_dim)
        return _rotate(self.k_proj(x).view(shape), rotary), self.v_proj(x).view(shape)


class _Mlp(nn.Module):
    def __init__(self, config: BlockModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


def _attend_causally(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[rows, heads · head_dim]; query [rows, kv heads, group, d], key and value [rows, kv heads, d]."""
    group = query.shape[2]
    key, value = (x.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for x in (key, value))
    attended = scaled_dot_product_attention(query.permute(1, 2, 0, 3), key, value, is_causal=True)
    return attended.permute(2, 0, 1, 3).flatten(1)


def _attend_blocks(
    query: Tensor, seen: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], bias: Tensor, size: int
) -> Tensor:
    """Attention of n blocks to their prefix and each to itself, [n · B, heads · head_dim].

    query [n · B, kv heads, group, d]; keys and values seen [prefix rows, kv heads, d] and own [n · B, kv heads, d];
    bias [n, prefix rows]. Written out, because a mask over all blocks would mostly hide: half the time for 32 blocks.
    """
    rows, kv_heads, group, dim = query.shape
    num_blocks, num_seen = rows // size, len(seen[0])
    query = (query * dim**-0.5).transpose(0, 1).reshape(kv_heads, rows * group, dim)
    seen_key, seen_value = (x.transpose(0, 1) for x in seen)
    own_key, own_value = (
        x.view(num_blocks, size, kv_heads, dim).permute(2, 0, 1, 3).reshape(kv_heads * num_blocks, size, dim)
        for x in own
    )
    to_seen = torch.bmm(query, seen_key.transpose(1, 2)).view(kv_heads, num_blocks, size * group, num_seen)
    to_own = torch.bmm(query.view(kv_heads * num_blocks, size * group, dim), own_key.transpose(1, 2))
    scores = torch.cat([to_seen + bias[:, None], to_own.view(kv_heads, num_blocks, size * group, size)], dim=-1)
    of_seen, of_own = torch.softmax(scores, dim=-1).to(query.dtype).split([num_seen, size], dim=-1)
    attended = torch.bmm(of_seen.reshape(kv_heads, rows * group, num_seen), seen_value).view(
        kv_heads, rows, group * dim
    )
    attended = attended + torch.bmm(of_own.reshape(kv_heads * num_blocks, size * group, size), own_value).view_as(
        attended
    )
    return attended.transpose(0, 1).flatten(1)


def _hidden_bias(anchors: Tensor, num_seen: int) -> Tensor:
    """[n, prefix rows]: -inf where a block does not look."""
    is_hidden = torch.arange(num_seen, device=anchors.device) >= anchors[:, None]
    return torch.zeros(is_hidden.shape, device=anchors.device).masked_fill_(is_hidden, -torch.inf)


def _rotate(x: Tensor, rotary: tuple[Tensor, ...]) -> Tensor:
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat([second, first], dim=-1), sin)
