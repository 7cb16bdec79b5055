"""transport=handle through Serve: the same answers, leases and failover without a port of our own."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest
from ray import serve
from ray.serve.handle import DeploymentHandle

from specdiff_dist.errors import VerifierUnavailable
from specdiff_dist.transport.handle_client import HandleVerifier
from tests.deployments.role_doubles import Answer, application, counters, seconds_until, table
from tests.doubles import make_request, plain_greedy
from tests.transport.doubles import verify_call

pytestmark = pytest.mark.ray

MAX_SESSIONS = 3
PROMPT = (4, 5, 6)
NUM_TOKENS = 200


@pytest.fixture(scope="module")
def app(serve_port: int) -> Iterator[dict[str, DeploymentHandle]]:
    built = application(verifier_replicas=2, transport="handle", max_sessions=MAX_SESSIONS)
    router = serve.run(built, name="by-handle", route_prefix=None)
    handles = {name: serve.get_deployment_handle(name, "by-handle") for name in ("Verifier", "Drafter")}
    yield {"Router": router, **handles}
    serve.delete("by-handle")


def nothing_held(app: dict[str, DeploymentHandle]) -> bool:
    every = [*counters(app["Verifier"], 2).values(), *counters(app["Drafter"]).values()]
    return all(values["num_sessions"] == values["num_leases"] == 0 for values in every)


def test_an_answer_is_the_verifiers_and_no_port_is_open(app):
    answer = Answer(app["Router"], make_request(PROMPT, max_tokens=60))
    assert answer.read() == plain_greedy(table(), PROMPT, 60)
    receipt = answer.receipt
    assert receipt.exact and not receipt.degraded and receipt.num_accepted_tokens > receipt.num_rounds
    addresses = [values["address"] for values in counters(app["Verifier"], 2).values()]
    assert len(set(addresses)) == 2 and not any(":" in address for address in addresses)
    assert seconds_until(lambda: nothing_held(app)) < 2.0


def test_sessions_side_by_side_reach_each_its_own_replica(app):
    """More of them than the drafter has places for; a call to the wrong replica would be refused for want of a lease, and
    be seen as a rebuild."""
    answers = [
        Answer(app["Router"], make_request((number, *PROMPT), max_tokens=25, request_id=f"{number}"))
        for number in range(3 * MAX_SESSIONS)
    ]
    for number, answer in enumerate(answers):
        assert answer.read() == plain_greedy(table(), (number, *PROMPT), 25)
        assert answer.receipt.verifier_rebuilds == 0
    assert seconds_until(lambda: nothing_held(app)) < 3.0


def test_a_cancelled_answer_frees_both_caches(app):
    answer = Answer(app["Router"], make_request(PROMPT, max_tokens=1500))
    answer.read(3)
    assert not nothing_held(app)
    answer.stream.cancel()
    assert seconds_until(lambda: nothing_held(app)) < 3.0


def test_a_replica_answers_leased_sessions_only(app):
    replica_id = next(iter(counters(app["Verifier"]).values()))["address"]
    send = app["Verifier"].options(method_name="call", session_id=replica_id).remote

    async def call_without_lease() -> None:
        await HandleVerifier(send).verify(verify_call(draft=()))

    with pytest.raises(VerifierUnavailable, match="no lease"):
        asyncio.run(call_without_lease())
    assert nothing_held(app)


def kill_the_one_in_use(handle: DeploymentHandle) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for pid, values in counters(handle).items():
            if values["num_sessions"]:
                os.kill(pid, signal.SIGKILL)
                return
    raise AssertionError("no replica holds the session")


def test_nothing_is_lost_when_replicas_die(app):
    """Calls that Serve cannot deliver any more wait neither for their deadline nor for the replacement."""
    answer = Answer(app["Router"], make_request(PROMPT, max_tokens=NUM_TOKENS))
    answer.read(5)
    kill_the_one_in_use(app["Verifier"])
    killed = time.monotonic()
    answer.read(5)
    kill_the_one_in_use(app["Drafter"])
    answer.read(2)
    assert time.monotonic() - killed < 15.0, "the deadline of a verify call is a minute"
    assert answer.read() == plain_greedy(table(), PROMPT, NUM_TOKENS)
    receipt = answer.receipt
    assert receipt.verifier_rebuilds == 1 and receipt.degraded and receipt.exact
