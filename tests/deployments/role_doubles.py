"""Engines for tests through Serve: tables behind real replicas, slow enough to be interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
from ray.serve import Application
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from deployments.builder import role_options
from deployments.drafter import Drafter
from deployments.messages import pack_call, unpack_item
from deployments.router import Router
from deployments.settings import AppSettings
from deployments.verifier import Verifier
from specdiff_dist.types import DraftBlock, DraftCall, GenerateRequest, Receipt, TargetRows, TokenChunk, VerifyCall
from tests.doubles import Logits, ScriptedDrafter, TableVerifier, random_table

VOCAB_SIZE = 40
CALL_S = 0.02


def table() -> Logits:
    return random_table(VOCAB_SIZE, 3, order=3)


class SlowVerifier(TableVerifier):
    def verify(self, call: VerifyCall) -> TargetRows:
        time.sleep(CALL_S)
        return super().verify(call)


class SlowDrafter(ScriptedDrafter):
    def draft(self, call: DraftCall) -> DraftBlock:
        time.sleep(CALL_S)
        return super().draft(call)


def load_verifier() -> SlowVerifier:
    return SlowVerifier(table(), VOCAB_SIZE, max_model_len=2048)


def load_drafter() -> SlowDrafter:
    return SlowDrafter(partial(mostly_right, table()), VOCAB_SIZE, max_model_len=2048)


def mostly_right(logits: Logits, prefix: tuple[int, ...], num_tokens: int) -> list[int]:
    """The target's own greedy continuation, wrong at every fifth position."""
    tokens = list(prefix)
    for _ in range(num_tokens):
        token = int(np.argmax(logits(tuple(tokens))))
        tokens.append((token + 1) % VOCAB_SIZE if len(tokens) % 5 == 0 else token)
    return tokens[len(prefix) :]


def application(
    router: Any = Router,
    load_verifier: Callable[[], Any] = load_verifier,
    load_drafter: Callable[[], Any] = load_drafter,
    **changes: Any,
) -> Application:
    """Router, verifier and drafter over the doubles; replicas are light, so that a new one is there in seconds."""
    settings = AppSettings(**changes)
    options: dict[str, Any] = {
        **role_options(settings),
        "health_check_period_s": 0.5,
        "graceful_shutdown_timeout_s": 1,
        "ray_actor_options": {"num_cpus": 0.1},
    }
    more: dict[str, Any] = {
        "transport": settings.transport, "grpc_host": "auto", "max_sessions": settings.max_sessions, "max_call_s": 60.0,
    }  # fmt: skip
    verifier = Verifier.options(num_replicas=settings.verifier_replicas, **options).bind(load_verifier, **more)
    drafter = Drafter.options(num_replicas=settings.drafter_replicas, **options).bind(load_drafter, **more)
    return router.options(
        max_ongoing_requests=100, health_check_period_s=0.5, ray_actor_options={"num_cpus": 0.1}
    ).bind(verifier, drafter if settings.has_drafter else None, settings, None)


class Answer:
    """A running call of `Router.generate`, seen from outside the cluster."""

    def __init__(self, router: DeploymentHandle, request: GenerateRequest, tier: str = "exact") -> None:
        stream = router.options(stream=True).generate.remote(pack_call(request, tier=tier, config=None))
        self.stream = cast(DeploymentResponseGenerator, stream)
        self.token_ids: list[int] = []
        self.last = TokenChunk((), "")

    @property
    def receipt(self) -> Receipt:
        assert self.last.receipt is not None, "the answer has not ended"
        return self.last.receipt

    def read(self, num_chunks: int | None = None) -> list[int]:
        """Reads so many chunks, or all. Returns the tokens so far."""
        for item in self.stream:
            self.last = unpack_item(item)
            self.token_ids += self.last.token_ids
            if num_chunks is not None:
                num_chunks -= 1
                if num_chunks == 0:
                    break
        return self.token_ids


def counters(handle: DeploymentHandle, num_replicas: int = 1) -> dict[int, dict[str, Any]]:
    """The counters of every replica, by process id; waits until at least `num_replicas` live ones answer.

    Asks all at once. Called one by one, a replica that was once seen busy is passed over for 10 seconds, as long as
    Serve believes the queue length it remembers.
    """
    deadline = time.monotonic() + 20
    while True:
        answers = handle.broadcast("counters").results(timeout_s=20, return_exceptions=True)  # the dead: exceptions
        found = {values["pid"]: values for values in answers if isinstance(values, dict)}
        if len(found) >= num_replicas:
            return found
        assert time.monotonic() < deadline, f"{len(found)} of {num_replicas} replicas answered: {answers}"
        time.sleep(0.05)


def seconds_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> float:
    """How long it takes until `condition` holds; fails after `timeout_s`."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, f"still not so after {timeout_s} s"
        time.sleep(0.05)
    return time.monotonic() - started
