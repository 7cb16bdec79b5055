"""The combined drafter in Serve: the router copies by itself, and asks drafter replicas where the text does not repeat."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray import serve

from tests.deployments.tiny_service import Service, body_of, prompt_of, tiny_service

pytestmark = pytest.mark.ray

REPEATING = prompt_of(12) * 4
FRESH = list(range(40))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, serve_port: int) -> Iterator[Service]:
    with tiny_service(tmp_path_factory.mktemp("copying"), serve_port, "copying", copies=True) as service:
        yield service


async def answers(service: Service, prompt: list[int], **fields: object) -> list[dict]:
    """With four drafted tokens a round, and plainly."""
    async with service.client() as client:
        replies = [
            await client.post(
                "/v1/completions", json=body_of(prompt, max_tokens=24, quality={"speculation": length}, **fields)
            )
            for length in (4, 0)
        ]
    assert [reply.status_code for reply in replies] == [200, 200]
    return [reply.json() for reply in replies]


async def test_what_is_copied_and_what_is_drafted_changes_no_token(service: Service):
    for prompt in (REPEATING, FRESH):
        drafted, plain = await answers(service, prompt)
        assert drafted["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
        assert drafted["quality"]["exact"] and not drafted["quality"]["degraded"]
        assert drafted["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


async def num_draft_calls(service: Service) -> int:
    counted = await serve.get_deployment_handle("Drafter", service.name).counters.remote()
    return counted["num_calls"]


async def test_rounds_that_copy_ask_no_replica(service: Service):
    num_before = await num_draft_calls(service)
    drafted, _ = await answers(service, REPEATING)
    counts = drafted["metrics"]["speculative_decoding"]
    num_asked = await num_draft_calls(service) - num_before
    assert 0 < num_asked < counts["num_draft_tokens"] / 4  # a call of this drafter gives four
    assert counts["num_accepted_draft_tokens"] > 0


async def test_drafting_ahead_is_refused_where_drafts_go_by_the_past(service: Service):
    async with service.client() as client:
        body = body_of(FRESH, quality={"speculation": 2, "draft_ahead": True})
        refused = await client.post("/v1/completions", json=body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "quality.draft_ahead" and "drafts from the tokens alone" in error["message"]
