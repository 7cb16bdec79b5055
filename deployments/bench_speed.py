"""`specdiff bench speed --through serve`: the deployments on this machine, asked over HTTP like by any client."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from deployments.bench_app import running_app
from deployments.settings import AppSettings
from specdiff_dist.bench.speed import Answer, Rounds, Task
from specdiff_dist.errors import InvalidRequest, SpecdiffError
from specdiff_dist.types import SamplingParams

TIMEOUT_S = 600.0


class HttpContender:
    """One client that keeps its connection. Streaming is off: what is timed is request sent to whole answer read."""

    def __init__(
        self, port: int, sampling: SamplingParams, num_tokens: int, tier: str, quality: Mapping[str, Any]
    ) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        self._options = {
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
            "max_tokens": num_tokens, "ignore_eos": True, "return_token_ids": True, "quality": {"tier": tier, **quality},
        }  # fmt: skip

    def __call__(self, task: Task) -> Answer:
        """Raises InvalidRequest with the service's own message when it refuses."""
        messages = [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else task.prompt
        body = json.dumps({**self._options, "messages": messages, "seed": task.seed})
        started = perf_counter()
        self._connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = self._connection.getresponse()
        text = response.read()
        seconds = perf_counter() - started
        if response.status != 200:
            raise InvalidRequest(f"the service answered {response.status}: {error_message(text)}")
        answer = json.loads(text)
        choice = answer["choices"][0]
        if tuple(choice["prompt_token_ids"]) != task.token_ids:
            raise SpecdiffError("the service tokenised the prompt differently; times would not compare")
        counts = answer["metrics"]["speculative_decoding"]
        rounds = Rounds(
            counts["num_spec_steps"], tuple(counts["acceptance_histogram"]), answer["quality"]["total_tv"] or 0.0
        )
        return Answer(tuple(choice["token_ids"]), seconds, rounds=rounds)

    def close(self) -> None:
        self._connection.close()


@contextmanager
def served(settings: AppSettings) -> Iterator[int]:
    """The application on a Ray of its own, with HTTP on 127.0.0.1; yields the port. Stopped at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with running_app(settings, route_prefix="/", http_options={"host": "127.0.0.1", "port": port}):
        yield port


def app_settings(model: str, drafter: str, dtype: str, num_threads: int) -> AppSettings:
    """Both roles compute with `num_threads` threads, as the baselines do."""
    return AppSettings(
        model=model, drafter=drafter, dtype=dtype,
        verifier_num_threads=num_threads, drafter_num_threads=num_threads,
    )  # fmt: skip


def error_message(text: bytes) -> str:
    """What the service says in a refusal."""
    try:
        return json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return text[:200].decode("utf-8", "replace")
