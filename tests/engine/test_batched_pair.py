"""Many requests at once through one real verifier and one real drafter: each gets what it gets alone (K27)."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from specdiff_dist.config import DecodeConfig, Effort, Off, Static
from specdiff_dist.drafters import load_drafter
from specdiff_dist.engine import decode
from specdiff_dist.train.start import from_verifier, with_features
from specdiff_dist.transport.local import LocalDrafter, LocalVerifier
from specdiff_dist.types import GenerateRequest, SamplingParams
from specdiff_dist.verifiers import load_verifier
from tests.tiny_models import VOCAB_SIZE, save_start, save_verifier, tiny_llama

PROMPT_LENGTHS = (1, 2, 3, 5, 8, 17, 40, 64, 65, 100, 129, 150)


@pytest.fixture(scope="module", params=[True, False], ids=["features", "causal"])
def engines(request, tmp_path_factory):
    """A verifier and a diffusion drafter that both keep to one thread's worth of arithmetic: tiny, float32."""
    folder = save_verifier(tmp_path_factory.mktemp("verifier"), tiny_llama(num_hidden_layers=4))
    start = from_verifier(folder, num_layers=3, layers=(0, 2, 3), block_size=4)
    if request.param:
        start = with_features(start, None)
    name = save_start(tmp_path_factory.mktemp("drafter") / "folder", start)
    drafter = load_drafter(name, verifier=str(folder), dtype="float32", device="cpu")
    return drafter, load_verifier(str(folder), dtype="float32", device="cpu")


def requests(temperature: float) -> list[tuple[GenerateRequest, DecodeConfig]]:
    """Prompts, lengths, efforts and policies all differ."""
    rng = np.random.default_rng(5)
    made = []
    for index, length in enumerate(PROMPT_LENGTHS * 2):
        prompt = tuple(rng.integers(3, VOCAB_SIZE, length).tolist())
        sampling = SamplingParams(0.0 if index % 3 == 0 else temperature, top_k=0 if index % 2 else 7)
        max_tokens = int(rng.integers(1, 30))
        policy = Off() if index % 5 == 4 else Static(1 + index % 4)
        config = DecodeConfig(policy=policy, effort=Effort(1 + index % 2))
        made.append((GenerateRequest(f"r{index}", prompt, sampling, seed=index, max_tokens=max_tokens), config))
    return made


async def answer(request, config, drafter, verifier):
    chunks = [chunk async for chunk in decode(request, config, drafter, verifier, tier="exact")]
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    return tokens, max(record.verify.batch_size for chunk in chunks for record in chunk.rounds)


async def test_requests_among_others_get_what_they_get_alone(engines):
    drafter, verifier = LocalDrafter(engines[0]), LocalVerifier(engines[1])
    work = requests(temperature=1.0)
    alone = [await answer(request, config, drafter, verifier) for request, config in work]
    together = await asyncio.gather(*(answer(request, config, drafter, verifier) for request, config in work))
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
    assert {size for _, size in alone} == {1}
    assert max(size for _, size in together) > 4  # they really met
    assert engines[0].num_sessions == engines[1].num_sessions == 0
    await drafter.close()
    await verifier.close()


async def test_requests_that_leave_take_nothing_with_them(engines):
    drafter, verifier = LocalDrafter(engines[0]), LocalVerifier(engines[1])
    work = requests(temperature=0.7)
    alone = [(await answer(request, config, drafter, verifier))[0] for request, config in work]
    tasks = [asyncio.create_task(answer(request, config, drafter, verifier)) for request, config in work]
    for index, task in enumerate(tasks):
        if index % 3 == 1:
            await asyncio.sleep(0.002)
            task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    kept = [
        (outcome[0], expected)
        for outcome, expected in zip(outcomes, alone, strict=True)
        if not isinstance(outcome, BaseException)
    ]
    assert len(kept) >= 16
    assert all(tokens == expected for tokens, expected in kept)
    assert engines[0].num_sessions == engines[1].num_sessions == 0
    await drafter.close()
    await verifier.close()
