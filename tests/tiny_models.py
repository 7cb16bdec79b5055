"""Random networks small enough for unit tests, in memory and as folders."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from specdiff_dist.drafters.block_model import BlockModel, BlockModelConfig
from specdiff_dist.train.start import Start

VOCAB_SIZE = 100
HIDDEN_SIZE = 32
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,  # wide enough for rows that differ
}


def tiny_llama(seed: int = 0, **changes: int | bool) -> LlamaForCausalLM:
    """float32, tied embeddings."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**_SHAPE, "tie_word_embeddings": True, **changes})).eval()


def tiny_sliding(window: int) -> MistralForCausalLM:
    """Every layer sees `window` tokens only."""
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**_SHAPE, sliding_window=window)).eval()


def save_verifier(folder: Path, model: PreTrainedModel, *, num_words: int = VOCAB_SIZE) -> Path:
    """A transformers folder with a tokenizer of `num_words` words."""
    model.save_pretrained(folder)
    vocab = {f"w{index}": index for index in range(num_words)}
    Tokenizer(WordLevel(vocab, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


def save_start(folder: Path, start: Start, weights: dict[str, torch.Tensor] | None = None) -> str:
    """A drafter folder with the start's own weights, or others. Returns its name for `load_drafter`."""
    folder.mkdir()
    fields = dataclasses.asdict(start.config)
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(dict(start.weights if weights is None else weights), folder / "drafter.safetensors")
    return str(folder)


def block_config(**changes: int) -> BlockModelConfig:
    shape = {key: value for key, value in _SHAPE.items() if key != "initializer_range"}
    return BlockModelConfig(**{**shape, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, **changes})  # pyright: ignore


def block_weights(model: LlamaForCausalLM, seed: int = 1) -> dict[str, torch.Tensor]:
    """A drafter's tensors: the layers of `model` and a random mask embedding."""
    weights = {
        name: tensor.clone()
        for name, tensor in model.state_dict().items()
        if name not in ("model.embed_tokens.weight", "lm_head.weight")
    }
    generator = torch.Generator().manual_seed(seed)
    weights["mask_embedding"] = 0.4 * torch.randn(HIDDEN_SIZE, generator=generator)
    return weights


def block_model(model: LlamaForCausalLM, *, dtype: torch.dtype = torch.float32, **changes: int) -> BlockModel:
    embedding = model.model.embed_tokens.weight.detach()
    return BlockModel(
        block_config(**changes), block_weights(model), embedding, embedding, dtype=dtype, device=torch.device("cpu")
    )


def save_drafter(
    folder: Path, model: LlamaForCausalLM, *, draft_vocab: torch.Tensor | None = None, **changes: int
) -> Path:
    """A drafter folder in the package's format."""
    import dataclasses
    import json

    folder.mkdir(parents=True, exist_ok=True)
    fields = dataclasses.asdict(block_config(**changes))
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
    (folder / "config.json").write_text(json.dumps(fields))
    weights = block_weights(model) if draft_vocab is None else {**block_weights(model), "draft_vocab": draft_vocab}
    save_file(weights, folder / "drafter.safetensors")
    return folder
