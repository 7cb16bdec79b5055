"""`specdiff generate` against transformers' own greedy `generate`, on the embedded pair and real questions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

NUM_QUESTIONS = 20
MAX_TOKENS = 64


def generate(questions: Path, *options: str) -> list[dict]:
    command = [sys.executable, "-m", "specdiff_dist.cli", "generate", "--prompt-file", str(questions)]
    done = subprocess.run(
        [
            *command,
            *("--limit", str(NUM_QUESTIONS), "--tier", "exact", "--temperature", "0", "--dtype", "float32"),
            *("--max-tokens", str(MAX_TOKENS), "--json", *options),
        ],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def reference(embedded_model, gsm8k) -> list[list[int]]:
    """Token ids of transformers' greedy answers, float32."""
    import torch
    from transformers import AutoModelForCausalLM

    prompts = generate(gsm8k, "--drafter", "none", "--max-tokens", "1")
    model: Any = AutoModelForCausalLM.from_pretrained(embedded_model.path, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt["prompt_token_ids"]])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS)
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("drafter", ["diffusion", "prompt-lookup"])
def test_token_ids_are_those_of_transformers_greedy_generate(gsm8k, reference, drafter, steps):
    answers = generate(gsm8k, "--drafter", drafter, "--num-denoising-steps", str(steps))

    assert [answer["token_ids"] for answer in answers] == reference
    assert all(answer["quality"]["exact"] for answer in answers)
    accepted = sum(answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] for answer in answers)
    assert accepted > 0  # or nothing was tested
