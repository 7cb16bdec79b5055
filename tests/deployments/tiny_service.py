"""A random pair of two layers each behind the real deployments and HTTP, and clients that ask many things at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from ray import serve

import deployments
from deployments.settings import AppSettings
from tests.deployments.role_doubles import counters
from tests.tiny_models import VOCAB_SIZE, save_drafter, save_verifier, tiny_llama

MAX_MODEL_LEN = 1024


@dataclass(frozen=True, slots=True)
class Service:
    """A running application."""

    name: str
    url: str
    settings: AppSettings

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=600, limits=limits)

    def nothing_held(self) -> bool:
        """No replica has a lease or a session's cache."""
        settings = self.settings
        roles = [("Verifier", settings.verifier_replicas), ("Drafter", settings.drafter_replicas)]
        each = [
            values
            for role, count in roles
            for values in counters(serve.get_deployment_handle(role, self.name), count).values()
        ]
        return all(values["num_sessions"] == values["num_leases"] == 0 for values in each)


@contextmanager
def tiny_service(folder: Path, port: int, name: str, *, copies: bool = False, **settings: Any) -> Iterator[Service]:
    """Serves a pair of MAX_MODEL_LEN tokens of context and VOCAB_SIZE ids, float32, on one thread each."""
    llama = tiny_llama(max_position_embeddings=MAX_MODEL_LEN)
    model = save_verifier(folder / "model", llama)
    drafter = save_drafter(folder / "drafter", llama, max_position_embeddings=MAX_MODEL_LEN)
    made = AppSettings(
        model=str(model), served_model_name="tiny", drafter=f"{drafter}+prompt-lookup" if copies else str(drafter), dtype="float32", verifier_num_threads=1,
        drafter_num_threads=1, **settings,
    )  # fmt: skip
    serve.run(deployments.app(made), name=name, route_prefix=f"/{name}")
    try:
        yield Service(name, f"http://127.0.0.1:{port}/{name}", made)
    finally:
        serve.delete(name)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Token ids that look random."""
    return [(7919 * (seed + 1) + 31 * index * index + 17 * index) % VOCAB_SIZE for index in range(length)]


def body_of(prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    """A completion request that runs to max_tokens and says which tokens it got; greedy unless told otherwise."""
    return {
        "model": "tiny", "prompt": list(prompt), "max_tokens": 16, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **fields,
    }  # fmt: skip


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> list[int]:
    """The answer's token ids, streamed or not. Fails unless the answer is whole."""
    if body.get("stream"):
        return await _ask_streaming(client, body)
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["prompt_token_ids"] == body["prompt"]
    assert answer["usage"]["prompt_tokens"] == len(body["prompt"])
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) == body["max_tokens"]
    return choice["token_ids"]


async def _ask_streaming(client: httpx.AsyncClient, body: dict[str, Any]) -> list[int]:
    token_ids, reasons, last = [], [], ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            last = line or last
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                token_ids += choice["token_ids"]
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert (last, reasons) == ("data: [DONE]", ["length"])
    assert len(token_ids) == body["max_tokens"]
    return token_ids


async def ask_all(service: Service, bodies: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The answers to all at once."""
    async with service.client() as client:
        return list(await asyncio.gather(*(ask(client, body) for body in bodies)))


async def ask_alone(service: Service, bodies: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The answers one after the other."""
    async with service.client() as client:
        return [await ask(client, body) for body in bodies]
