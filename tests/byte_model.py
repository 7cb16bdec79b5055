"""A tiny pair that needs no weights: a byte-level tokenizer in a real model folder, and tables over its vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from specdiff_dist.api import Pair
from specdiff_dist.models import ModelFolder
from specdiff_dist.text import Tokenizer
from specdiff_dist.types import SamplingParams
from tests.doubles import ScriptedDrafter, TableVerifier, greedy_script, random_table

MAX_MODEL_LEN = 256
BOS = "<s>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB_SIZE = len(ALPHABET) + 1
TABLE = random_table(VOCAB_SIZE, seed=3, order=2)


def write_folder(folder: Path) -> ModelFolder:
    """A model folder with everything but weights: one token per byte, and <s>."""
    vocabulary = {letter: number for number, letter in enumerate(ALPHABET)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BOS])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "chat_template": TEMPLATE}))
    return ModelFolder(
        name="bytes",
        path=folder,
        eos_token_ids=(),
        max_model_len=MAX_MODEL_LEN,
        default_sampling=SamplingParams(0.0),
        has_chat_template=True,
    )


def make_pair(folder: Path, *, with_drafter: bool = True) -> Pair:
    """A pair whose drafter knows exactly what its verifier will say."""
    model = write_folder(folder)
    drafter = ScriptedDrafter(greedy_script(TABLE), VOCAB_SIZE) if with_drafter else None
    verifier = TableVerifier(TABLE, VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)
    return Pair(model, Tokenizer.load(folder), drafter, verifier)
