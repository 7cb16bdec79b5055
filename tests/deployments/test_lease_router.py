"""Which replica a call goes to, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deployments.lease_router import LeaseRouter

REPLICAS: list[Any] = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in ("a", "b", "c")]


def request(session_id: str) -> Any:
    context = SimpleNamespace(should_backoff=False)
    return SimpleNamespace(metadata=SimpleNamespace(session_id=session_id), routing_context=context)


@pytest.fixture
def router() -> LeaseRouter:
    return object.__new__(LeaseRouter)  # the rest of it is Serve's


async def test_a_call_goes_to_the_replica_it_names_and_to_no_other(router):
    for replica in REPLICAS:
        assert await router.choose_replicas(REPLICAS, request(replica.replica_id.unique_id)) == [[replica]]
    assert await router.choose_replicas(REPLICAS, request("gone")) == [[]]


async def test_leases_have_two_replicas_to_choose_from(router):
    seen = set()
    for _ in range(200):
        ((one, other),) = await router.choose_replicas(REPLICAS, request(""))
        assert one is not other
        seen |= {one.replica_id.unique_id, other.replica_id.unique_id}
    assert seen == {"a", "b", "c"}
    assert await router.choose_replicas(REPLICAS[:1], request("")) == [REPLICAS[:1]]


async def test_serve_pauses_before_it_asks_again(router):
    for session_id in ("a", "gone", ""):
        asked = request(session_id)
        await router.choose_replicas(REPLICAS, asked)
        assert asked.routing_context.should_backoff
