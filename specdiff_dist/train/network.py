"""The draft network as it is trained: `drafters.BlockModel` over many blocks of many answers at once.

Matrix products are what training costs, so nothing is computed that no loss looks at: one pass over a prefix serves all
blocks after it, of the last layer's prefix only keys and values are made, and of the last layer's block positions only
those with a loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from specdiff_dist.drafters.block_model import MASK_ID, BlockModelConfig
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
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.model.norm = _Norm(config)
        self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size))
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
        with torch.set_grad_enabled(self.trains_prefix and torch.is_grad_enabled()):
            prefix = self._prefix(batch)
        return self._blocks(batch, prefix)

    def _prefix(self, batch: BlockBatch) -> list[Tensor]:
        """The causal pass: what each layer makes its prefix keys and values from, normed, [C, H]."""
        splits = batch.prefix_splits
        positions = torch.cat([torch.arange(b - a) for a, b in zip(splits, splits[1:], strict=False)])
        rotary = self._rotary(positions.to(batch.prefix_ids.device))
        x = self._embed(batch.prefix_ids)
        normed = []
        for index, layer in enumerate(self._layers()):
            y = layer.input_layernorm(x)
            normed.append(y)
            if index == len(self.model.layers) - 1:
                break
            query, key, value = layer.self_attn.query(y, rotary), *layer.self_attn.key_value(y, rotary)
            attended = [
                _attend(query[a:b], key[a:b], value[a:b], None)
                for a, b in zip(splits, splits[1:], strict=False)
                if b > a
            ]
            x = x + layer.self_attn.o_proj(torch.cat(attended))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return normed

    def _blocks(self, batch: BlockBatch, prefix: Sequence[Tensor]) -> Tensor:
        size = batch.block_size
        splits = batch.prefix_splits
        device = batch.block_ids.device
        prefix_positions = torch.cat([torch.arange(b - a) for a, b in zip(splits, splits[1:], strict=False)])
        prefix_rotary = self._rotary(prefix_positions.to(device))
        rotary = self._rotary((batch.anchors[:, None] + torch.arange(size, device=device)).flatten())
        spans = [  # prefix rows, block rows
            (slice(a, b), slice(c * size, d * size))
            for a, b, c, d in zip(splits, splits[1:], batch.block_splits, batch.block_splits[1:], strict=False)
        ]
        masks = [_mask(batch.anchors[own.start // size : own.stop // size], size, seen) for seen, own in spans]
        x = self._embed(batch.block_ids.flatten())
        for index, layer in enumerate(self._layers()):
            y = layer.input_layernorm(x)
            key, value = layer.self_attn.key_value(y, rotary)
            seen_key, seen_value = layer.self_attn.key_value(prefix[index], prefix_rotary)
            chosen = [own for _, own in spans]
            if index == len(self.model.layers) - 1:
                x, y, rotary = x[batch.wanted], y[batch.wanted], tuple(table[batch.wanted] for table in rotary)
                bounds = torch.searchsorted(
                    batch.wanted, torch.tensor([0, *(own.stop for own in chosen)], device=device)
                )
                ends = bounds.tolist()
                masks = [
                    mask[batch.wanted[a:b] - own.start]
                    for mask, own, a, b in zip(masks, chosen, ends, ends[1:], strict=False)
                ]
                chosen = [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)]
            query = layer.self_attn.query(y, rotary)
            attended = [
                _attend(
                    query[rows], torch.cat([seen_key[seen], key[own]]), torch.cat([seen_value[seen], value[own]]), mask
                )
                for rows, (seen, own), mask in zip(chosen, spans, masks, strict=True)
                if rows.stop > rows.start
            ]
            x = x + layer.self_attn.o_proj(torch.cat(attended))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.norm(x)

    def _layers(self) -> list[_Layer]:
        return list(self.model.layers)  # pyright: ignore[reportArgumentType, reportReturnType]

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


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """[rows, heads · head_dim]; query [rows, kv heads, group, d], key and value [columns, kv heads, d]; causal without
    mask, else bool [rows, columns]."""
    group = query.shape[2]
    key, value = (x.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for x in (key, value))
    attended = scaled_dot_product_attention(
        query.permute(1, 2, 0, 3), key, value, attn_mask=mask, is_causal=mask is None
    )
    return attended.permute(2, 0, 1, 3).flatten(1)


def _mask(anchors: Tensor, block_size: int, seen: slice) -> Tensor:
    """bool [n · B, prefix rows + n · B]: what the blocks of one answer see."""
    columns = torch.arange(seen.stop - seen.start, device=anchors.device)
    prefix = columns < anchors.repeat_interleave(block_size)[:, None]
    block = torch.arange(len(anchors), device=anchors.device).repeat_interleave(block_size)
    return torch.cat([prefix, block == block[:, None]], dim=1)


def _rotate(x: Tensor, rotary: tuple[Tensor, ...]) -> Tensor:
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat([second, first], dim=-1), sin)
