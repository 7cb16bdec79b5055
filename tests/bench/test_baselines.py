"""transformers' own decoding as the baseline: the same tokens as our loop, whatever the model folder's defaults."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from specdiff_dist.bench.baselines import TransformersModel, num_threads
from specdiff_dist.bench.speed import Answer, Task
from specdiff_dist.errors import ModelUnavailable
from specdiff_dist.types import SamplingParams
from tests.tiny_models import VOCAB_SIZE, save_verifier, tiny_llama

PROMPT = tuple(np.random.default_rng(0).integers(0, VOCAB_SIZE, 12).tolist())
TASK = Task("", PROMPT, 7)
GREEDY = SamplingParams(0.0)
NUM_TOKENS = 24


def greedy(model: torch.nn.Module) -> list[int]:
    """The plainest loop: no cache, no generate."""
    tokens = list(PROMPT)
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return greedy(tiny_llama())


@pytest.fixture(scope="module")
def folder(tmp_path_factory, expected) -> Path:
    """A model whose defaults would sample, and stop at a token that its greedy answer holds."""
    path = save_verifier(tmp_path_factory.mktemp("model"), tiny_llama())
    defaults = {"do_sample": True, "temperature": 0.2, "top_k": 3, "eos_token_id": expected[5], "pad_token_id": 1}
    (path / "generation_config.json").write_text(json.dumps(defaults))
    return path


def answer(folder: Path, sampling: SamplingParams, *, prompt_lookup: bool = False, task: Task = TASK) -> Answer:
    model = TransformersModel(folder, dtype="float32", device="cpu")
    return model.contender(sampling, NUM_TOKENS, prompt_lookup=prompt_lookup)(task)


@pytest.mark.parametrize("prompt_lookup", [False, True])
def test_greedy_answers_are_the_models_own_beyond_eos(folder, expected, prompt_lookup):
    got = answer(folder, GREEDY, prompt_lookup=prompt_lookup)
    assert list(got.token_ids) == expected
    assert got.rounds is None


def test_the_first_tokens_are_timed(folder):
    got = answer(folder, GREEDY)
    assert got.first_s is not None and 0.0 < got.first_s < got.seconds
    assert got.num_first == 1


def test_prompt_lookup_is_really_used(folder, expected, monkeypatch):
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    asked: list[int] = []
    original = PromptLookupCandidateGenerator.get_candidates

    def get_candidates(self, input_ids, **more):
        asked.append(self.num_output_tokens)
        return original(self, input_ids, **more)

    monkeypatch.setattr(PromptLookupCandidateGenerator, "get_candidates", get_candidates)
    answer(folder, GREEDY)
    assert not asked
    answer(folder, GREEDY, prompt_lookup=True)
    assert set(asked) == {10}


@pytest.mark.parametrize("prompt_lookup", [False, True])
def test_sampling_parameters_reach_generate(folder, expected, prompt_lookup):
    one = answer(folder, SamplingParams(1.0, top_k=1), prompt_lookup=prompt_lookup)
    assert list(one.token_ids) == expected  # top-k 1 leaves one token, at any temperature
    sampled = answer(folder, SamplingParams(5.0), prompt_lookup=prompt_lookup)
    assert list(sampled.token_ids) != expected
    assert sampled.token_ids == answer(folder, SamplingParams(5.0), prompt_lookup=prompt_lookup).token_ids  # the seed
    other = Task("", PROMPT, 8)
    assert sampled.token_ids != answer(folder, SamplingParams(5.0), prompt_lookup=prompt_lookup, task=other).token_ids
    assert len(sampled.token_ids) == NUM_TOKENS


def test_engine_threads_compute_with_as_many_threads():
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert (num_threads()["here"], num_threads()["in_engine_thread"]) == (count, count)
    finally:
        torch.set_num_threads(before)


def test_a_folder_that_is_no_model_is_an_error(tmp_path):
    with pytest.raises(ModelUnavailable, match="cannot load"):
        TransformersModel(tmp_path, dtype="float32")
