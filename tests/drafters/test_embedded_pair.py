"""The real pair: the shipped weights must go on agreeing with the embedded verifier about as often as their card says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specdiff_dist.config import Effort
from specdiff_dist.drafters import load_drafter
from specdiff_dist.models import ModelFolder
from specdiff_dist.roles import DrafterEngine, VerifierEngine
from specdiff_dist.text import Tokenizer
from specdiff_dist.types import DraftCall, PrefixStatement, SamplingParams, VerifyCall, prefix_crc
from specdiff_dist.verifiers import load_verifier

BLOCK, NUM_QUESTIONS, NUM_TOKENS = 4, 4, 48
GREEDY = SamplingParams(0.0)


def statement(tokens: list[int], cached: int) -> PrefixStatement:
    committed = np.array(tokens, np.int32)
    return PrefixStatement("s", len(tokens), cached, prefix_crc(committed[:cached]), committed[cached:])


def greedy_answer(verifier: VerifierEngine, prompt: list[int]) -> list[int]:
    tokens, cached = list(prompt), 0
    while len(tokens) < len(prompt) + NUM_TOKENS:
        call = VerifyCall(statement(tokens, cached), np.zeros(0, np.int32), GREEDY, None, np.zeros(1))
        target = verifier.verify(call)
        cached = target.cached_len
        tokens.append(int(target.rows.token_ids[0]))
    return tokens


def agreement(drafter: DrafterEngine, tokens: list[int], num_prompt: int) -> np.ndarray:
    """bool [positions, BLOCK]: draft token j after each prefix of the answer equals the answer's."""
    hits, cached = [], 0
    for length in range(num_prompt, len(tokens) - BLOCK):
        block = drafter.draft(DraftCall(statement(tokens[:length], cached), BLOCK, Effort(), GREEDY, 64, 0))
        cached = block.cached_len
        hits.append(block.token_ids == np.array(tokens[length : length + BLOCK]))
    return np.array(hits)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_the_shipped_weights_agree_with_the_verifier(embedded_model: ModelFolder, gsm8k: Path, dtype: str):
    tokenizer = Tokenizer.load(embedded_model.path)
    verifier = load_verifier(embedded_model.name, device="cpu")
    drafter = load_drafter("diffusion", verifier=embedded_model.name, dtype=dtype, device="cpu")
    hits = []
    for line in gsm8k.read_text(encoding="utf-8").splitlines()[:NUM_QUESTIONS]:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": json.loads(line)["question"]}])
        tokens = greedy_answer(verifier, prompt)
        hits.append(agreement(drafter, tokens, len(prompt)))
        verifier.release("s")
        drafter.release("s")
    found = np.concatenate(hits)
    acceptance_length = 1 + np.cumprod(found, axis=1).sum(axis=1).mean()
    assert found[:, 0].mean() > 0.35
    assert acceptance_length > 1.4
