"""Batches against one text at a time, with an independent forward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from specdiff_dist.core.randomness import Purpose, uniforms
from specdiff_dist.errors import InvalidConfig
from specdiff_dist.train.generation import BatchWriter
from specdiff_dist.train.jobs import Job, Written
from specdiff_dist.train.packed_linear import PackedLinear, pack_linears
from specdiff_dist.train.top_rows import draw, top_logits
from specdiff_dist.train.verifier_model import check_model
from tests.tiny_models import tiny_llama, tiny_sliding

VOCAB = 97  # the output matrix has three more columns that must never be drawn
STOP = tuple(range(7))  # none of them in a prompt
NEW = 24


def prompts(count: int, *, shared: int = 3) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    head = generator.integers(7, VOCAB, shared)
    return [
        np.concatenate([head, generator.integers(7, VOCAB, generator.integers(1, 30))]).astype(np.int32)
        for _ in range(count)
    ]


def write(model: PreTrainedModel, jobs: Sequence[Job], batch_size: int, seed: int = 0) -> dict[object, Written]:
    found: dict[object, Written] = {}

    def then(written: Written) -> list[Job]:
        found[written.job.label] = written
        return []

    writer = BatchWriter(
        model, vocab_size=VOCAB, stop_ids=STOP, max_new_tokens=NEW, batch_size=batch_size, seed=seed
    )  # fmt: skip
    writer.write(jobs, then, longest=max(len(job.token_ids) for job in jobs))
    return found


@torch.inference_mode()
def logits_of(model: PreTrainedModel, token_ids: np.ndarray) -> torch.Tensor:
    """Without cache, mask or padding."""
    return model(input_ids=torch.from_numpy(token_ids.astype(np.int64))[None], use_cache=False).logits[0, :, :VOCAB]


def law_of(model: PreTrainedModel, written: Written) -> torch.Tensor:
    """Logits that each token of an answer was drawn from, [t, VOCAB]."""
    prompt = written.job.token_ids
    return logits_of(model, np.concatenate([prompt, written.token_ids]))[len(prompt) - 1 : -1]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama()


@pytest.mark.parametrize("shared", [0, 3])
@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_greedy_answers_and_their_rows_are_those_of_a_plain_forward(model, batch_size, shared):
    jobs = [Job(i, prompt, 0.0, 1.0, (i, 0)) for i, prompt in enumerate(prompts(11, shared=shared))]
    found = write(model, jobs, batch_size)
    assert set(found) == set(range(11))
    for written in found.values():
        logits = law_of(model, written)
        assert written.token_ids.tolist() == logits.argmax(dim=-1).tolist()
        stops = [at for at, token_id in enumerate(written.token_ids) if token_id in STOP]
        assert stops == ([len(written.token_ids) - 1] if written.has_ended else [])
        assert written.has_ended or len(written.token_ids) == NEW
        expected = torch.topk(torch.log_softmax(logits, dim=-1), 32, dim=-1)
        assert np.allclose(written.top_log_probs, expected.values, atol=4e-3)
        on_ids = torch.log_softmax(logits, dim=-1).gather(1, torch.from_numpy(written.top_ids).long())
        assert np.allclose(on_ids, expected.values, atol=1e-4)
    assert {written.has_ended for written in found.values()} == {True, False}


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.95)])
def test_sampled_tokens_are_drawn_with_the_numbers_of_their_stream(model, temperature, top_p):
    jobs = [Job(i, prompt, temperature, top_p, (100 + i, 2)) for i, prompt in enumerate(prompts(9))]
    for written in write(model, jobs, 4, seed=7).values():
        logits = law_of(model, written)
        count = len(written.token_ids)
        numbers = uniforms(7, Purpose.TARGET, 0, count, stream=written.job.stream[0], step=2)
        expected = draw(
            logits, top_logits(logits), torch.full((count,), temperature), torch.full((count,), top_p),
            torch.from_numpy(numbers).float(),
        )  # fmt: skip
        assert written.token_ids.tolist() == expected.tolist()


def test_the_same_jobs_give_the_same_bits_and_another_seed_other_tokens(model):
    jobs = [Job(i, prompt, 1.0, 1.0, (i, 0)) for i, prompt in enumerate(prompts(7))]
    first, again, other = write(model, jobs, 3), write(model, jobs, 3), write(model, jobs, 3, seed=1)
    for label, written in first.items():
        assert written.top_log_probs.tobytes() == again[label].top_log_probs.tobytes()
        assert written.token_ids.tobytes() == again[label].token_ids.tobytes()
    assert any(first[label].token_ids.tolist() != other[label].token_ids.tolist() for label in first)


def test_jobs_that_come_later_are_done_too(model):
    order: list[object] = []
    late = Job("late", prompts(1)[0], 0.0, 1.0, (0, 0))

    def then(written: Written) -> list[Job]:
        order.append(written.job.label)
        return [late] if written.job.label == 0 else []

    writer = BatchWriter(model, vocab_size=VOCAB, stop_ids=STOP, max_new_tokens=NEW, batch_size=2, seed=0)
    writer.write([Job(i, prompt, 0.0, 1.0, (i, 0)) for i, prompt in enumerate(prompts(3))], then, longest=40)
    assert set(order) == {0, 1, 2, "late"}


def test_packed_weights_give_the_same_sums():
    plain, packed = tiny_llama(), tiny_llama()
    pack_linears(packed, 4)
    assert sum(isinstance(module, PackedLinear) for module in packed.modules()) == 2 * 7 + 1
    token_ids = prompts(1)[0]
    assert torch.allclose(logits_of(plain, token_ids), logits_of(packed, token_ids), atol=1e-4)
    half = tiny_llama().to(torch.bfloat16)  # pyright: ignore[reportArgumentType]
    pack_linears(half, 4)
    assert not any(isinstance(module, PackedLinear) for module in half.modules())


def test_a_window_that_hides_the_beginning_is_refused():
    check_model(tiny_sliding(64), 64)
    with pytest.raises(InvalidConfig, match="sees 64 tokens"):
        check_model(tiny_sliding(64), 65)
