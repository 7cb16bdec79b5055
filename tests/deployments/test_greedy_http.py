"""The embedded pair through HTTP against transformers' own greedy `generate`, on real questions (slow)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve

import deployments
from deployments.settings import AppSettings
from specdiff_dist.models import ModelFolder

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NUM_QUESTIONS = 20
MAX_TOKENS = 64


@pytest.fixture(scope="module")
def questions(gsm8k: Path) -> list[str]:
    return [json.loads(line)["question"] for line in gsm8k.read_text(encoding="utf-8").splitlines()[:NUM_QUESTIONS]]


def ask(client: httpx.Client, question: str, steps: int) -> dict[str, Any]:
    body = {
        "model": "smollm2-135m", "messages": [{"role": "user", "content": question}], "temperature": 0,
        "max_tokens": MAX_TOKENS, "return_token_ids": True, "quality": {"tier": "exact", "effort": steps},
    }  # fmt: skip
    response = client.post("/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def expected(embedded_model: ModelFolder, questions: list[str]) -> list[list[int]]:
    """Token ids of transformers' greedy answers, float32, by transformers' own tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(embedded_model.path)
    model: Any = AutoModelForCausalLM.from_pretrained(embedded_model.path, dtype=torch.float32)
    answers = []
    for question in questions:
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(**chat, do_sample=False, max_new_tokens=MAX_TOKENS)
        answers.append(out[0, chat["input_ids"].shape[1] :].tolist())
    return answers


@pytest.mark.parametrize("drafter", ["diffusion", "prompt-lookup"])
def test_token_ids_through_http(serve_port: int, questions: list[str], expected: list[list[int]], drafter: str) -> None:
    serve.run(deployments.app(AppSettings(dtype="float32", drafter=drafter)), name="greedy", route_prefix="/greedy")
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{serve_port}/greedy/v1", timeout=300) as client:
            for steps in (1, 2, 4) if drafter == "diffusion" else (1,):  # effort means nothing to a lookup
                answers = [ask(client, question, steps) for question in questions]
                assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
                metrics = [answer["metrics"]["speculative_decoding"] for answer in answers]
                assert sum(one["num_accepted_draft_tokens"] for one in metrics) > 0
                assert all(answer["quality"]["exact"] for answer in answers)
    finally:
        serve.delete("greedy")
