"""Requests side by side, through HTTP: each gets what it gets alone, and seeds mean what they say (K10, K27)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.deployments.role_doubles import seconds_until
from tests.deployments.tiny_service import Service, ask, ask_all, ask_alone, body_of, prompt_of, tiny_service

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def service(serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("neighbours")
    with tiny_service(folder, serve_port, "neighbours", ingress_replicas=2) as service:
        yield service
        assert seconds_until(service.nothing_held) < 5.0  # whatever the tests did


def quality(index: int) -> dict[str, object]:
    """Lengths 0 … 8, in turn."""
    return {"tier": "exact", "speculation": index % 9}


async def test_mixed_seeds_in_parallel_are_each_what_they_are_alone(service):
    """vLLM issue 9441: parallel requests with different seeds corrupted each other."""
    bodies = [
        body_of(
            prompt_of(5 + index, index),
            temperature=(0, 0, 1.0, 0.7)[index % 4],
            top_p=0.95 if index % 8 == 7 else 1.0,  # some rows travel whole, some do not
            stream=index % 3 == 0,
            **({} if index % 4 == 0 else {"seed": index // 2}),  # sampled ones are all seeded
        )
        for index in range(16)
    ]
    alone = await ask_alone(service, bodies)
    assert await ask_all(service, bodies) == alone
    assert await ask_all(service, bodies[::-1]) == alone[::-1]


async def test_prompts_and_lengths_of_all_sizes_side_by_side(service):
    """mlx-lm issue 965: with 16 at once, caches crossed."""
    lengths = [1, 2, 3, 500, 4, 499, 64, 65, 128, 129, 7, 300, 33, 1, 250, 16, 17, 400, 90, 5, 200, 150, 8, 450]
    bodies = [
        body_of(prompt_of(length, index), quality=quality(index), max_tokens=20 + index)
        for index, length in enumerate(lengths)
    ]
    alone = await ask_alone(service, bodies)
    assert await ask_all(service, bodies) == alone
    plain = [{**body, "quality": quality(0)} for body in bodies]
    assert await ask_all(service, plain) == alone  # greedy in float32: speculation changes no token


async def test_drafting_ahead_changes_no_token(service):
    bodies = [
        body_of(
            prompt_of(4 + index, index), temperature=(0, 1.0)[index % 2], seed=index, max_tokens=30,
            quality={"tier": "exact", "speculation": 1 + index % 3, "draft_ahead": True},
        )
        for index in range(12)
    ]  # fmt: skip
    alone = await ask_alone(service, bodies)
    assert await ask_all(service, bodies) == alone
    greedy = [{**body, "quality": quality(0)} for body in bodies[::2]]
    assert await ask_all(service, greedy) == alone[::2]


async def test_eight_times_the_same_is_eight_times_the_same(service):
    """TGI issue 1411: odd characters only in batches."""
    body = body_of(prompt_of(40), quality=quality(4), max_tokens=40)
    (alone,) = await ask_alone(service, [body])
    assert await ask_all(service, [body] * 8) == [alone] * 8


async def test_an_abandoned_turn_leaves_nothing_in_the_next(service):
    """SGLang pull request 36552: a turn whose client was gone spoiled the session's next turn."""
    first, second = prompt_of(30, 1), [*prompt_of(30, 1), *prompt_of(6, 2)]
    body = body_of(second, quality=quality(4))
    (alone,) = await ask_alone(service, [body])
    async with service.client() as client:
        for stream in (True, False) * 3:
            turn = body_of(first, quality=quality(4), max_tokens=900, stream=stream)
            task = asyncio.create_task(ask(client, turn))
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()  # it was cut off, not done
            assert await ask(client, body) == alone  # also checks the prompt's tokens and their number


async def test_a_seed_fixes_the_text_and_another_changes_it(service):
    """vLLM issue 6038: with speculation a request's seed had no effect."""
    body = body_of(prompt_of(9), temperature=1.5, quality=quality(4), max_tokens=24)
    seven = await ask_alone(service, [{**body, "seed": 7}] * 5)
    assert seven == [seven[0]] * 5
    assert await ask_all(service, [{**body, "seed": 7}] * 5) == seven
    assert await ask_alone(service, [{**body, "seed": 8}]) != [seven[0]]


async def test_without_seeds_no_two_answers_are_the_same(service):
    """TensorRT-LLM issue 19487: unseeded requests shared one random stream. Here two ingress replicas choose seeds."""
    bodies = [body_of(prompt_of(9), temperature=1.0, max_tokens=24, quality=quality(4))] * 20
    serial, parallel = await ask_alone(service, bodies), await ask_all(service, bodies)
    assert len(set(map(tuple, serial + parallel))) == 40
