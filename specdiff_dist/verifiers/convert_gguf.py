"""Turns one GGUF file into a transformers folder: config, safetensors, tokenizer, chat template.

    python -m specdiff_dist.verifiers.convert_gguf model.gguf target-folder

Run as its own process by `specdiff_dist.models`, so that the router and the command line never import torch.

Weights are written as float32. They are what llama.cpp's blocks stand for (scale * q + min, evaluated in float32), and
four in five of them for the embedded verifier have no exact bfloat16 or float16 value; so float32 keeps `float32` runs
lossless, and `bfloat16` runs round the same weights once, at load. Price: 538 MB on disk instead of 269 MB, mapped into
memory and not read in one go.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

# `tokenizer.ggml.pre` values whose pre-tokenizer splits every digit off before the byte-level step, as llama.cpp does.
# transformers' GGUF reader knows only the plain byte-level one, which cuts "\n\n1" differently from the model's own
# tokenizer ("\n", "\n", "1" instead of "\n\n", "1").
SINGLE_DIGIT_PRE_TOKENIZERS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")


def convert(source: Path, target: Path) -> None:
    """Reads `source`, writes a folder `target` (made if missing) with config.json, generation_config.json,
    model.safetensors (float32, tied tensors once), tokenizer.json, tokenizer_config.json and chat_template.jinja.

    Raises OSError, ValueError or whatever transformers raises on a file that it cannot read.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target.mkdir(parents=True, exist_ok=True)
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name, "local_files_only": True}

    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # The weights are dequantised by now; what is left of the quantisation would forbid saving them.
    model.hf_quantizer = None  # pyright: ignore[reportArgumentType]
    del model.config.quantization_config  # pyright: ignore[reportAttributeAccessIssue]
    model.config.eos_token_id = model.generation_config.eos_token_id
    model.save_pretrained(target, max_shard_size="100GB")
    # safetensors writes 0600; a cache may be shared between users as its other files are.
    shutil.copymode(target / "config.json", target / "model.safetensors")

    tokenizer = AutoTokenizer.from_pretrained(**where)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.save_pretrained(target)
    if _pre_tokenizer_name(source) in SINGLE_DIGIT_PRE_TOKENIZERS:
        _split_digits(target / "tokenizer.json")


def _pre_tokenizer_name(source: Path) -> str | None:
    from gguf import GGUFReader

    field = GGUFReader(source).get_field("tokenizer.ggml.pre")
    return None if field is None else str(field.contents())


def _split_digits(tokenizer_json: Path) -> None:
    content = json.loads(tokenizer_json.read_text("utf-8"))
    digits = {"type": "Digits", "individual_digits": True}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, content["pre_tokenizer"]]}
    tokenizer_json.write_text(json.dumps(content, ensure_ascii=False, indent=2), "utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="specdiff_dist.verifiers.convert_gguf", description=__doc__)
    parser.add_argument("source", type=Path, help="GGUF file")
    parser.add_argument("target", type=Path, help="folder to write")
    arguments = parser.parse_args(argv)
    convert(arguments.source, arguments.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
