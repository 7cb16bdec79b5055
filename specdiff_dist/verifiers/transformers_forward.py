"""The verifier's forward pass by transformers: any causal language model whose KV cache can be cut back."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from specdiff_dist.errors import InvalidConfig
from specdiff_dist.verifiers.device import pick_device, pick_dtype
from specdiff_dist.verifiers.folder import real_vocab_size
from specdiff_dist.verifiers.forward import Forwarded, ForwardPart
from specdiff_dist.verifiers.transformers_model import load_causal_lm

_CROPPABLE_LAYERS = {"full_attention", "sliding_attention"}


class TransformersForward:
    """One model and the arithmetic of its caches; knows no sessions. Not thread-safe.

    The cache is DynamicCache *without* the model's config: layers with a sliding window then keep all rows too (the mask
    still hides what lies outside the window), so that cutting a rejected block off can never meet rows that are gone.
    """

    def __init__(self, model: PreTrainedModel, *, vocab_size: int | None = None) -> None:
        """`vocab_size`: tokens of the real vocabulary; the columns that only pad the output matrix are left out."""
        _check_croppable(model)
        text_config = model.config.get_text_config(decoder=True)
        padded = int(text_config.vocab_size)
        self._model = model.eval()
        self.vocab_size = padded if vocab_size is None else min(vocab_size, padded)
        self.max_model_len = int(getattr(text_config, "max_position_embeddings", None) or 1 << 30)
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.device_type = model.device.type
        self._layers = _decoder_layers(model)
        self.num_layers, self.hidden_size = len(self._layers), int(text_config.hidden_size)
        self.kv_bytes_per_token = _kv_size(text_config) * model.dtype.itemsize

    @staticmethod
    def load(folder: Path, *, dtype: str = "auto", device: str = "auto") -> TransformersForward:
        """Loads a transformers folder. dtype: float32, bfloat16 or auto (bfloat16). device: auto is CUDA where there is.

        Raises InvalidConfig on an unknown dtype or a model without a croppable cache, ModelUnavailable when the folder
        cannot be read.
        """
        model = load_causal_lm(folder, pick_dtype(dtype))
        model.to(pick_device(device))
        return TransformersForward(model, vocab_size=real_vocab_size(folder))

    def new_cache(self) -> DynamicCache:
        return DynamicCache()

    def crop(self, cache: DynamicCache, length: int) -> None:
        """Cuts the cache to its first `length` tokens."""
        surplus = cache.get_seq_length() - length
        if surplus > 0:
            cache.crop(-surplus)

    def copy_cache(self, cache: DynamicCache, length: int) -> DynamicCache:
        """Its first `length` tokens as a cache of their own."""
        head = deepcopy(cache)
        self.crop(head, length)
        return head

    def forward_parts(self, parts: Sequence[ForwardPart[DynamicCache]]) -> list[Forwarded]:
        """See ModelForward. On the model's device; features in its dtype. Part after part: a DynamicCache belongs to one
        session, and joining ragged ones would pad every session to the longest."""
        return [self._forward_one(part) for part in parts]

    @torch.inference_mode()
    def _forward_one(self, part: ForwardPart[DynamicCache]) -> Forwarded:
        device, start = self._model.device, part.cache.get_seq_length()
        ids = torch.from_numpy(np.ascontiguousarray(part.token_ids, np.int64)).to(device)[None]
        positions = torch.arange(start, start + part.num_tokens, device=device)[None]
        hidden: list[Tensor] = []

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            hidden.append((output if isinstance(output, Tensor) else output[0])[0])

        # Hooks instead of output_hidden_states, which keeps all layers and gives the last one after the final norm.
        hooks = [self._layers[index].register_forward_hook(keep) for index in part.feature_layers]
        try:
            output = self._model(
                input_ids=ids, position_ids=positions, cache=part.cache, use_cache=True,
                logits_to_keep=max(part.num_logits, 1),  # 0 means all of them
            )  # fmt: skip
        finally:
            for hook in hooks:
                hook.remove()
        logits = output.logits[0]
        logits = logits[len(logits) - part.num_logits :, : self.vocab_size].float()
        return Forwarded(logits, torch.cat(hidden, dim=-1) if hidden else None)


def _kv_size(config: PretrainedConfig) -> int:
    """Numbers that a cached token takes."""
    heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or int(config.hidden_size) // heads
    return (
        2 * int(config.num_hidden_layers) * int(getattr(config, "num_key_value_heads", None) or heads) * int(head_dim)
    )


def _decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers whose outputs are the residual stream; none where the model does not show them: it gives no features."""
    layers = getattr(model.get_decoder(), "layers", None)
    return list(layers) if isinstance(layers, nn.ModuleList) else []


def _check_croppable(model: PreTrainedModel) -> None:
    name = type(model).__name__
    layer_types = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
    if not layer_types <= _CROPPABLE_LAYERS:
        raise InvalidConfig(
            f"{name} has {', '.join(sorted(layer_types - _CROPPABLE_LAYERS))} layers, whose state cannot be cut back "
            "after a rejection; use a verifier with attention layers only"
        )
    missing = {"cache", "logits_to_keep", "position_ids"} - set(inspect.signature(model.forward).parameters)
    if missing:
        raise InvalidConfig(f"{name}.forward takes no {', '.join(sorted(missing))}; it cannot be used as a verifier")
