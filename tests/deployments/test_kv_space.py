"""Admission by KV space: what a session's cache may grow to is reserved when it is placed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray import serve

from deployments.kv_space import GROWTH, KVSpace
from specdiff_dist.errors import InvalidConfig
from specdiff_dist.verifiers import device
from tests.deployments.role_doubles import counters
from tests.deployments.tiny_service import tiny_service


def engine(**fields: Any) -> Any:
    return SimpleNamespace(**fields)


def test_the_space_is_what_was_set_or_a_share_of_the_free_memory(monkeypatch):
    monkeypatch.setattr(device, "free_memory", lambda device_type: 3_000_000)
    model = engine(kv_bytes_per_token=1000, device_type="cpu")
    assert KVSpace(tokens=77).num_tokens(model) == 77
    assert KVSpace(share=0.5).num_tokens(model) == 3_000_000 // 2 // 1000 / GROWTH
    assert KVSpace(share=0.5, kept_tokens=400).num_tokens(model) == 600
    assert KVSpace().num_tokens(engine()) is None
    with pytest.raises(InvalidConfig, match="kv_cache_tokens"):
        KVSpace(share=0.5, kept_tokens=1000).num_tokens(model)


def test_free_memory_is_within_the_control_groups_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    whole = device.free_memory("cpu")
    assert whole > 1 << 20
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert device.free_memory("cpu") == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert device.free_memory("cpu") == pytest.approx(whole, rel=0.2)


@pytest.mark.ray
def test_requests_wait_for_room_and_those_that_can_never_have_it_are_told(serve_port, tmp_path):
    with tiny_service(tmp_path, serve_port, "space", kv_cache_tokens=100, max_sessions=16) as service:

        async def ask(client: httpx.AsyncClient, max_tokens: int) -> httpx.Response:
            body = {"prompt": [1] * 10, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
            return await client.post("/v1/completions", json=body)

        async def main() -> tuple[list[httpx.Response], httpx.Response, int]:
            most = 0
            async with service.client() as client:
                tasks = [asyncio.create_task(ask(client, 40)) for _ in range(8)]
                while not all(task.done() for task in tasks):
                    handle = serve.get_deployment_handle("Verifier", service.name)
                    for values in (await asyncio.to_thread(counters, handle, 1)).values():
                        assert values["kv_tokens_total"] == 100
                        assert (
                            values["kv_returns"] == 0
                        )  # an answer of less than a step has all its room from the start
                        most = max(most, values["kv_tokens_reserved"])
                    await asyncio.sleep(0.01)
                return [task.result() for task in tasks], await ask(client, 91), most

        answers, too_long, most = asyncio.run(main())
        assert [answer.status_code for answer in answers] == [200] * 8
        assert all(answer.json()["usage"]["completion_tokens"] == 40 for answer in answers)
        assert 50 <= most <= 100
        assert too_long.status_code == 400
        assert "maximum context length is 100" in too_long.json()["error"]["message"]
