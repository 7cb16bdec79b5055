"""A random verifier with a chat template, small enough to write thousands of tokens in a test, and prompts for it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

WORDS = [f"w{number}" for number in range(60)]
SPECIAL = ["<|unk|>", "<|start|>", "<|end|>"]
TEMPLATE = (
    "{% for message in messages %}<|start|> {{ message['role'] }} {{ message['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|start|> assistant {% endif %}"
)
END = 2


def write_chat_model(folder: Path, seed: int = 0) -> Path:
    """A transformers folder: 63 + 2 words, the real vocabulary smaller than the output matrix."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=72, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, initializer_range=0.3, eos_token_id=END,
        bos_token_id=1, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return write_tokenizer(folder)


def write_tokenizer(folder: Path) -> Path:
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, "user", "assistant", *WORDS])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token=SPECIAL[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "bos_token": "<|start|>"}))
    return folder


def write_prompts(file: Path, prompts: list[str]) -> Path:
    file.write_text("".join(json.dumps({"question": prompt}) + "\n" for prompt in prompts))
    return file


def some_prompts(count: int, length: int = 6) -> list[str]:
    return [
        " ".join(WORDS[(7 * number + 11 * at + number * at) % 60] for at in range(length)) for number in range(count)
    ]
