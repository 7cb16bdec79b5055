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

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from specdiff_dist.drafters.linear import int8_linear
from specdiff_dist.errors import InvalidConfig
from specdiff_dist.verifiers.folder import read_config
from specdiff_dist.verifiers.kernels import BlockLayers, BlockMatrix, has_block_layers, why_no_kernels
from specdiff_dist.verifiers.llama_layers import KVCache, LlamaLayers, LlamaShape, Weights, rope_of, rotate
from specdiff_dist.verifiers.packed_linear import make_linear

MASK_ID = -1  # input id of a masked position


@dataclass(frozen=True, slots=True)
class BlockModelConfig(LlamaShape):
    """Shape of the network; read from the config.json of a drafter folder (Llama's keys)."""

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
        rope = rope_of(raw)
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


@dataclass(frozen=True, slots=True, eq=False)
class BlockPart:
    """What one session adds in a forward of the network. No two parts of a forward have the same cache."""

    cache: KVCache
    causal_ids: Tensor  # int64 [m] committed tokens, kept in the cache
    block_ids: Tensor  # int64 [b] after them, MASK_ID for masked positions, not kept

    @property
    def num_tokens(self) -> int:
        return len(self.causal_ids) + len(self.block_ids)


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
        hidden = config.hidden_size

        tensors = Weights(weights, owner="drafter", dtype=self.dtype, device=device)
        take, kv_size = tensors.take, config.num_key_value_heads * config.head_dim
        if dtype == torch.qint8 and has_block_layers(config) and not why_no_kernels():
            self._layers = BlockLayers(config, tensors, BlockMatrix.nearest)
        else:
            self._layers = LlamaLayers(config, tensors, matrix, dtype=self.dtype, device=device)
        self._mask_embedding = take("mask_embedding", hidden)
        if config.feature_layers:
            self._feature_norm = take("feature_norm.weight", config.feature_size)
            # In floating point also in an int8 drafter: one scale for numbers so uneven would leave nothing of most.
            self._fusion = make_linear(take("feature_fusion.weight", hidden, config.feature_size))
            self._feature_kv = [
                matrix(
                    torch.cat(
                        [take(f"model.layers.{i}.self_attn.{name}_proj.weight", kv_size, hidden) for name in "kv"]
                    )
                )
                for i in range(config.num_hidden_layers)
            ]
        # Looked up a few rows at a time: half precision is kept for the table even where the arithmetic is float32.
        self._embedding = embedding.to(device=device, dtype=torch.bfloat16 if dtype == torch.qint8 else self.dtype)
        self.draft_vocab = _draft_vocab(weights.get("draft_vocab"), config.vocab_size, device)
        rows = output if self.draft_vocab is None else output[self.draft_vocab.to(output.device)]
        self._output = matrix(rows.to(device=device, dtype=self.dtype))

    def new_cache(self) -> KVCache:
        return self._layers.new_cache()

    def forward(self, cache: KVCache, causal_ids: Tensor, block_ids: Tensor) -> Tensor:
        """`forward_parts` of one part."""
        return self.forward_parts([BlockPart(cache, causal_ids, block_ids)])[0]

    @torch.inference_mode()
    def forward_parts(self, parts: Sequence[BlockPart]) -> list[Tensor]:
        """One pass over committed tokens (kept in their caches) and blocks (not kept) of several sessions, every part with
        one or the other. Returns the normed hidden states of each block's positions, [b, H]."""
        layers = self._layers
        num_block = [len(part.block_ids) for part in parts]
        batch = layers.place([part.cache for part in parts], [len(part.causal_ids) for part in parts], num_block)
        x = self._embed(torch.cat([ids for part in parts for ids in (part.causal_ids, part.block_ids)]))
        x, _ = layers.forward(batch, x, block_only=all(num_block))
        batch.commit()
        hidden = x if len(x) == sum(num_block) else batch.block_rows(x)
        return list(layers.final_norm(hidden).split(num_block))

    @torch.inference_mode()
    def remember(self, cache: KVCache, token_ids: Tensor, features: Tensor) -> None:
        """Adds committed tokens to the cache by their features. token_ids: int64 [m]; features: [m, F · H], any float dtype."""
        config, start, end = self.config, cache.length, cache.length + len(token_ids)
        if start == end:
            return
        cache.reserve(end)
        rotary = self._layers.rotary(start, end)
        num_features, hidden, kv_heads = len(config.feature_layers), config.hidden_size, config.num_key_value_heads
        normed = self._unit(features.to(self.device, torch.float32).view(-1, num_features, hidden)).to(self.dtype)
        normed = normed.mul_(self._feature_norm.view(num_features, hidden))
        fused = self._fusion(normed.flatten(1))
        embedded = self._embed(token_ids) if -1 in config.feature_sources else fused
        for index, source in enumerate(config.feature_sources):
            x = fused + (embedded if source < 0 else normed[:, source])
            key, value = self._feature_kv[index](self._layers.normed_for(index, x)).view(
                len(x), 2, kv_heads, config.head_dim
            ).unbind(1)  # fmt: skip
            cache.keys[index, :, start:end] = rotate(key, *rotary).transpose(0, 1)
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

    def _embed(self, ids: Tensor) -> Tensor:
        rows = self._embedding[ids.clamp(min=0)].to(self.dtype)
        return torch.where((ids == MASK_ID)[:, None], self._mask_embedding, rows)

    def _unit(self, x: Tensor) -> Tensor:
        return rms_norm(x, (self.config.hidden_size,), eps=self.config.rms_norm_eps)


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
