"""Replicas killed in the middle of an answer: the answer is the one it would have been."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from ray import serve
from ray.serve.handle import DeploymentHandle

from tests.deployments.role_doubles import Answer, application, counters, table
from tests.doubles import make_request, plain_greedy

pytestmark = pytest.mark.ray

PROMPT = (4, 5, 6)
NUM_TOKENS = 400


@pytest.fixture(scope="module")
def app(serve_port: int) -> Iterator[dict[str, DeploymentHandle]]:
    router = serve.run(application(verifier_replicas=2), name="failover", route_prefix=None)
    handles = {name: serve.get_deployment_handle(name, "failover") for name in ("Verifier", "Drafter")}
    yield {"Router": router, **handles}
    serve.delete("failover")


@pytest.fixture
def expected() -> list[int]:
    return plain_greedy(table(), PROMPT, NUM_TOKENS)


def pid_in_use(handle: DeploymentHandle) -> int:
    """Process id of the replica that holds the one session there is."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for pid, values in counters(handle).items():
            if values["num_sessions"]:
                return pid
    raise AssertionError("no replica holds the session")


def test_a_killed_drafter_makes_the_rest_plain_until_it_is_back(app, expected):
    answer = Answer(app["Router"], make_request(PROMPT, max_tokens=NUM_TOKENS))
    answer.read(5)
    os.kill(pid_in_use(app["Drafter"]), signal.SIGKILL)
    killed = time.monotonic()
    answer.read(1)
    assert time.monotonic() - killed < 1.0  # nobody waits for the drafter
    assert answer.read() == expected
    receipt = answer.receipt
    assert receipt.degraded and receipt.exact and receipt.verifier_rebuilds == 0
    assert not answer.last.rounds[-1].degraded  # drafting again by the end: a new replica is there within seconds


@pytest.mark.parametrize("num_kills", [1, 4])
def test_a_killed_verifier_is_rebuilt_from_the_committed_tokens(app, expected, num_kills):
    counters(app["Verifier"], 2)
    answer = Answer(app["Router"], make_request(PROMPT, max_tokens=NUM_TOKENS))
    for _ in range(num_kills):
        answer.read(5)
        os.kill(pid_in_use(app["Verifier"]), signal.SIGKILL)
    assert answer.read() == expected
    receipt = answer.receipt
    assert receipt.verifier_rebuilds == num_kills and not receipt.degraded


def test_no_verifier_left_means_waiting_for_its_replacement(app, expected):
    answer = Answer(app["Router"], make_request(PROMPT, max_tokens=NUM_TOKENS))
    answer.read(5)
    for pid in counters(app["Verifier"], 2):
        os.kill(pid, signal.SIGKILL)
    assert answer.read() == expected
    assert answer.receipt.verifier_rebuilds >= 1
