"""Penalties and logprobs of the embedded pair, against transformers on the same weights (K09 row 49, K12 rows 61 and 63)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specdiff_dist import load_pair
from specdiff_dist.api import Completion, Pair
from specdiff_dist.models import ModelFolder

pytestmark = pytest.mark.slow

QUESTIONS = ("Why is the sky blue?", "Count from one to twenty.")
MAX_TOKENS = 40
OFF = {"speculation": "off"}
DRAFTING = {"speculation": 4}


@pytest.fixture(scope="module", params=["diffusion", "combined"])
def pair(request: pytest.FixtureRequest, embedded_model: ModelFolder) -> Iterator[Pair]:
    with load_pair(str(embedded_model.path), drafter=request.param, dtype="float32") as pair:
        yield pair


@pytest.fixture(scope="module")
def reference(embedded_model: ModelFolder) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(embedded_model.path, dtype=torch.float32)


def both(pair: Pair, question: str, **options: Any) -> list[Completion]:
    """The answer with and without the drafter."""
    return [pair.generate(question, max_tokens=MAX_TOKENS, quality=quality, **options) for quality in (DRAFTING, OFF)]


@pytest.mark.parametrize("penalty", [1.3, 0.9])
def test_repetition_penalty_is_transformers_own(pair: Pair, reference: Any, penalty: float) -> None:
    import torch

    num_accepted = 0
    for question in QUESTIONS:
        drafted, plain = both(pair, question, temperature=0.0, repetition_penalty=penalty)
        ids: Any = torch.tensor([plain.prompt_token_ids])
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS,
            repetition_penalty=penalty,
        )  # fmt: skip
        assert list(drafted.token_ids) == list(plain.token_ids) == out[0, ids.shape[1] :].tolist()
        num_accepted += drafted.receipt.num_accepted_tokens
    assert num_accepted > 0


def test_frequency_penalty_of_either_sign(pair: Pair) -> None:
    texts = []
    for penalty in (1.5, -1.5):
        drafted, plain = both(pair, QUESTIONS[1], temperature=0.0, frequency_penalty=penalty)
        assert drafted.token_ids == plain.token_ids
        texts.append(drafted.text)
    assert texts[0] != texts[1]


@pytest.mark.parametrize("top_k", [0, 50])
def test_logprobs_are_the_log_softmax_of_transformers(pair: Pair, reference: Any, top_k: int) -> None:
    import torch

    options = {"temperature": 0.8, "top_p": 1.0, "top_k": top_k, "seed": 3, "logprobs": 5}
    for completion in both(pair, QUESTIONS[0], **options):
        ids: Any = torch.tensor([completion.prompt_token_ids + completion.token_ids])
        with torch.inference_mode():
            logits = reference(ids).logits[0, len(completion.prompt_token_ids) - 1 : -1]
        expected = torch.log_softmax(logits.double(), -1)
        assert len(completion.logprobs) == len(completion.token_ids)
        for row, token, reported in zip(expected, completion.token_ids, completion.logprobs, strict=True):
            assert reported.logprob == pytest.approx(float(row[token]), abs=1e-3)
            best = torch.topk(row, 5)
            assert list(reported.top_logprobs) == pytest.approx(best.values.tolist(), abs=1e-3)
