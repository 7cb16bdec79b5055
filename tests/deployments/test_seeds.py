"""Seeds and several choices, through the official client and a real round loop (K10, K11)."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from deployments.openai_api.app import build_api
from specdiff_dist.core.randomness import fresh_seed
from tests.deployments.fake_backend import BOS_ID, NAME, VOCAB_SIZE, make_model
from tests.deployments.test_openai_api_client import TABLE, EngineBackend, served
from tests.doubles import TableDrafter, TableVerifier

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def client(model):
    """A drafter that samples, and answers that end by themselves now and then."""
    wish = 4.0 * np.eye(VOCAB_SIZE, dtype=np.float32)[BOS_ID]
    verifier = TableVerifier(lambda prefix: TABLE(prefix) + wish, VOCAB_SIZE, eos_token_ids=(BOS_ID,))
    backend = EngineBackend(model.tokenizer, drafter=TableDrafter(VOCAB_SIZE), verifier=verifier)
    async with served(build_api(backend, model)) as client:
        yield client


async def ids_of(client: Any, **fields: Any) -> list[list[int]]:
    extra = {"return_token_ids": True, "quality": {"speculation": 3}, "top_k": 0, "top_p": 1.0}
    answer = await client.chat.completions.create(
        **{"model": NAME, "messages": MESSAGES, "max_tokens": 16, "extra_body": extra, **fields}
    )
    return [choice.model_extra["token_ids"] for choice in answer.choices]


async def test_a_seed_fixes_the_text_and_another_one_changes_it(client):
    """K10 row 53."""
    answers = [await ids_of(client, seed=7, temperature=1.5) for _ in range(5)]
    assert all(answer == answers[0] for answer in answers)
    assert await ids_of(client, seed=8, temperature=1.5) != answers[0]


async def test_unseeded_answers_differ(client):
    """K10 row 55."""
    answers = [tuple((await ids_of(client, temperature=1.0))[0]) for _ in range(20)]
    assert len(set(answers)) > 10


def _put_seed(queue: Any) -> None:
    queue.put(fresh_seed())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_no_two_processes_start_with_the_same_seeds():
    """K10 row 55: replicas take their seeds from the operating system, also one forked from another."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=_put_seed, args=(queue,)) for _ in range(2)]
    for child in children:
        child.start()
    seeds = [queue.get(timeout=20) for _ in children]
    for child in children:
        child.join()
    script = "from specdiff_dist.core.randomness import fresh_seed; print(fresh_seed())"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
        seeds.append(int(done.stdout))
    assert len(set(seeds)) == 4


async def test_choices_end_by_themselves(client):
    """K11 row 57: as many as asked for, not all equal, of different lengths, each with its own reason."""
    answer = await client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=16, n=4, seed=1, temperature=1,
        extra_body={"return_token_ids": True, "quality": {"speculation": 3}, "top_k": 0, "top_p": 1.0},
    )  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [choice.model_extra["token_ids"] for choice in answer.choices]
    assert len({tuple(text) for text in texts}) > 1
    assert len({len(text) for text in texts}) > 1
    for choice, text in zip(answer.choices, texts, strict=True):
        assert choice.finish_reason == ("stop" if text[-1] == BOS_ID else "length")
        assert len(text) == 16 or choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == sum(map(len, texts))
