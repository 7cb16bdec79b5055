"""Answers of toy verifiers, in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from specdiff_dist.train.answers import Answer, AnswerStore
from tests.tiny_models import VOCAB_SIZE


class ToyAnswers(AnswerStore):
    """Kept in memory only."""

    def __init__(self, answers: list[Answer]) -> None:
        super().__init__(Path("nowhere"), {"sources": ["toy"]}, [len(answers)])
        self._answers = answers

    def answer(self, index: int) -> Answer:
        return self._answers[index]


@torch.inference_mode()
def answers_of(verifier: LlamaForCausalLM, *, count: int = 40, seed: int = 0, longest: int = 30) -> ToyAnswers:
    """Random prompts of a few tokens with greedy answers of random length, and the verifier's laws of them."""
    rng = np.random.default_rng(seed)
    answers = []
    for _ in range(count):
        prompt, length = rng.integers(0, VOCAB_SIZE, rng.integers(2, 6)), int(rng.integers(3, longest))
        tokens = torch.from_numpy(prompt)[None]
        for _ in range(length):
            tokens = torch.cat([tokens, verifier(tokens).logits[:, -1:].argmax(dim=-1)], dim=1)
        log_probs = torch.log_softmax(verifier(tokens).logits[0, len(prompt) - 1 : -1], dim=-1)
        top = torch.topk(log_probs, 32, dim=-1)
        answers.append(
            Answer(
                tokens[0].numpy().astype(np.int32),
                len(prompt),
                top.indices.numpy().astype(np.int32),
                top.values.numpy().astype(np.float16),  # pyright: ignore[reportArgumentType]
                0,
            )
        )
    return ToyAnswers(answers)


def counting_answers(count: int, *, seed: int = 0) -> ToyAnswers:
    """Texts that count round and round from 0 to 9, by a verifier that is nearly sure of it: easy to learn."""
    rng = np.random.default_rng(seed)
    answers = []
    for _ in range(count):
        tokens = (rng.integers(10) + np.arange(rng.integers(8, 24))) % 10
        length = len(tokens) - 3
        top_ids = (tokens[3:, None] + np.arange(32)) % VOCAB_SIZE
        probs = np.where(np.arange(32) == 0, 0.9, 0.1 / 31)
        answers.append(
            Answer(
                tokens.astype(np.int32),
                3,
                top_ids.astype(np.int32),
                np.broadcast_to(np.log(probs), (length, 32)).astype(np.float16),  # pyright: ignore[reportArgumentType]
                0,
            )
        )
    return ToyAnswers(answers)
