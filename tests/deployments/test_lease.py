"""Leases through Serve: who holds cache, and when it is given back."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any, cast

import numpy as np
import pytest
from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from deployments.endpoints import GrpcEndpoint
from deployments.ingress import RouterBackend
from deployments.messages import pack_call, unpack_item
from deployments.open_leases import OpenLeases
from deployments.replica import GuardedDrafter, Replica
from deployments.router import Router
from specdiff_dist.config import DecodeConfig, Effort, Linear
from specdiff_dist.errors import DrafterUnavailable, InexactConfig, InvalidRequest, VerifierUnavailable
from specdiff_dist.transport.grpc_client import GrpcDrafter, GrpcVerifier
from specdiff_dist.transport.grpc_server import start_drafter_server
from specdiff_dist.types import DraftCall, PrefixStatement, SamplingParams, VerifyCall
from tests.deployments.role_doubles import VOCAB_SIZE, Answer, counters, seconds_until, table
from tests.deployments.role_doubles import application as role_application
from tests.doubles import ScriptedDrafter, TableDrafter, make_request, plain_greedy

pytestmark = pytest.mark.ray

MAX_SESSIONS = 4
PROMPT = (1, 2, 3)


class OpenRouter(Router.func_or_class):  # the real router, and a look into its process
    async def process(self) -> tuple[int, list[str]]:
        return os.getpid(), sorted(sys.modules)

    async def num_channels(self) -> int:
        return len(self._pool)

    async def num_tasks(self) -> int:
        return len(asyncio.all_tasks())


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Client:
    """Calls the router as the ingress does."""

    def __init__(self, router: DeploymentHandle) -> None:
        self._backend = RouterBackend(router)

    async def abandon(self, delays_s: list[float]) -> int:
        """Begins an answer after the other and cancels each after a delay. Returns how many had begun to arrive."""
        return sum([await self._abandon(f"abandoned-{i}", delay_s) for i, delay_s in enumerate(delays_s)])

    async def _abandon(self, request_id: str, delay_s: float) -> bool:
        chunks = []

        async def read() -> None:
            request = make_request(PROMPT, max_tokens=1500, request_id=request_id)
            async with aclosing(self._backend.generate(request, None, "exact")) as answer:
                async for chunk in answer:
                    chunks.append(chunk)

        task = asyncio.create_task(read())
        await asyncio.sleep(delay_s)
        task.cancel()
        await asyncio.wait({task})
        return bool(chunks)


@pytest.fixture(scope="module")
def app(serve_port: int) -> Iterator[dict[str, DeploymentHandle]]:
    open_router = serve.deployment(OpenRouter, name="Router")
    application = role_application(open_router, max_sessions=MAX_SESSIONS)
    serve.run(Client.bind(application), name="leases", route_prefix=None)
    yield {name: serve.get_deployment_handle(name, "leases") for name in ("Client", "Router", "Verifier", "Drafter")}
    serve.delete("leases")


def held(app: dict[str, DeploymentHandle]) -> list[tuple[Any, Any]]:
    """(leases, sessions with cache) of the verifier and the drafter."""
    values = [next(iter(counters(app[name]).values())) for name in ("Verifier", "Drafter")]
    return [(each["num_leases"], each["num_sessions"]) for each in values]


def nothing_held(app: dict[str, DeploymentHandle]) -> bool:
    return held(app) == [(0, 0), (0, 0)]


def test_an_answer_is_the_verifiers_and_leaves_nothing_behind(app):
    answer = Answer(app["Router"], make_request(PROMPT, max_tokens=60))
    answer.read(2)
    assert held(app) == [(1, 1), (1, 1)]
    assert answer.read() == plain_greedy(table(), PROMPT, 60)
    receipt = answer.receipt
    assert receipt.exact and not receipt.degraded and receipt.verifier_rebuilds == 0
    assert receipt.num_accepted_tokens > receipt.num_rounds  # the drafter did draft
    assert seconds_until(lambda: nothing_held(app)) < 1.0


def test_a_cancelled_answer_frees_both_caches(app):
    answer = Answer(app["Router"], make_request(PROMPT, max_tokens=1500))
    answer.read(3)
    assert held(app) == [(1, 1), (1, 1)]
    answer.stream.cancel()
    assert seconds_until(lambda: nothing_held(app)) < 2.0


def test_answers_cancelled_at_any_moment_leave_no_place_taken(app):
    """Ray Serve issue 44644: a request cancelled just as it starts kept its place for ever."""
    delays_s = [0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1] * 12
    num_begun = app["Client"].abandon.remote(delays_s).result()
    assert 0 < num_begun < len(delays_s)  # some were cancelled before their first chunk, some after
    assert seconds_until(lambda: nothing_held(app)) < 2.0
    answers = [
        Answer(app["Router"], make_request(PROMPT, max_tokens=5, request_id=f"{i}")) for i in range(MAX_SESSIONS)
    ]
    assert [answer.read() for answer in answers] == [plain_greedy(table(), PROMPT, 5)] * MAX_SESSIONS


def test_more_sessions_than_places_wait_their_turn(app):
    num_answers = 3 * MAX_SESSIONS
    answers = [
        Answer(app["Router"], make_request(PROMPT, max_tokens=10, request_id=f"{i}")) for i in range(num_answers)
    ]
    assert [answer.read() for answer in answers] == [plain_greedy(table(), PROMPT, 10)] * num_answers
    assert seconds_until(lambda: nothing_held(app)) < 2.0


def test_sessions_leave_no_task_and_share_one_channel_per_replica(app):
    router = app["Router"]
    Answer(router, make_request(PROMPT, max_tokens=5)).read()
    before = router.num_tasks.remote().result()
    for index in range(10):
        Answer(router, make_request(PROMPT, max_tokens=5, request_id=f"{index}")).read()
    seconds_until(lambda: router.num_tasks.remote().result() <= before)
    assert router.num_channels.remote().result() == 2


def test_a_replica_answers_leased_sessions_only(app):
    address = next(iter(counters(app["Verifier"]).values()))["address"]
    assert address.startswith("127.0.0.1:")  # one machine: nobody else can reach the port
    prefix = PrefixStatement("stranger", 0, 0, 0, np_int32(PROMPT))
    call = VerifyCall(prefix, np_int32(()), SamplingParams(0.0), None, np_float64(1))

    async def call_without_lease() -> None:
        client = GrpcVerifier(address)
        try:
            await client.verify(call)
        finally:
            await client.close()

    with pytest.raises(VerifierUnavailable, match="no lease"):
        asyncio.run(call_without_lease())
    assert nothing_held(app)


def read_all(app: dict[str, DeploymentHandle], packed_call: bytes) -> None:
    answer = app["Router"].options(stream=True).generate.remote(packed_call)
    for item in cast(DeploymentResponseGenerator, answer):
        unpack_item(item)


def test_requests_that_cannot_be_served_are_typed_errors(app):
    too_long = pack_call(make_request(PROMPT, max_tokens=5000), tier="exact", config=None)
    with pytest.raises(InvalidRequest, match="context length") as long_error:
        read_all(app, too_long)
    assert long_error.value.param == "max_tokens"
    with pytest.raises(InvalidRequest, match="'best'"):
        read_all(app, pack_call(make_request(PROMPT), tier="best", config=None))
    with pytest.raises(InvalidRequest, match="malformed"):
        read_all(app, b"\xc1")
    assert nothing_held(app)


def test_the_exact_tier_refuses_an_inexact_config_by_trap(app):
    config = DecodeConfig(Linear(0.1))  # this drafter is deterministic: no policy or effort could make it inexact
    with pytest.raises(InexactConfig) as error:
        read_all(app, pack_call(make_request(PROMPT, temperature=1.0), tier="exact", config=config))
    assert error.value.trap == 0


async def test_a_lease_nobody_uses_ends_by_itself(serve_port):
    """Serve's cancellation is best effort; whatever it misses heals."""
    engine = ScriptedDrafter(lambda prefix, n: [1] * n, VOCAB_SIZE)
    leases = OpenLeases()
    server = await start_drafter_server(GuardedDrafter(engine, leases))
    client = GrpcDrafter(server.address)
    replica = Replica(GrpcEndpoint("Drafter", server), leases, max_call_s=60.0, idle_lease_s=0.3)
    started = time.monotonic()
    async for _ in replica.lease("session", None):
        for round_index in range(3):
            await asyncio.sleep(0.2)
            prefix = PrefixStatement("session", round_index, 0, 0, np_int32(PROMPT))
            await client.draft(DraftCall(prefix, 2, Effort(), SamplingParams(0.0), 4, seed=0))
        assert replica.counters()["num_sessions"] == 1
    assert 0.9 <= time.monotonic() - started < 5.0
    assert replica.counters()["num_sessions"] == replica.counters()["num_leases"] == 0
    with pytest.raises(DrafterUnavailable, match="no lease"):
        await client.draft(DraftCall(prefix, 2, Effort(), SamplingParams(0.0), 4, seed=0))
    await client.close()
    await server.stop()


async def test_a_model_that_is_stuck_fails_the_health_check(serve_port):
    leases = OpenLeases()
    server = await start_drafter_server(ScriptedDrafter(lambda prefix, n: [1] * n, VOCAB_SIZE))
    replica = Replica(GrpcEndpoint("Drafter", server), leases, max_call_s=0.05)
    leases.open("session")
    with leases.busy():
        replica.check_model()
        await asyncio.sleep(0.1)
        with pytest.raises(RuntimeError, match="model call"):
            replica.check_model()
    replica.check_model()
    await server.stop()


def test_the_router_imports_neither_torch_nor_transformers(app):
    Answer(app["Router"], make_request(PROMPT, max_tokens=5)).read()
    _, modules = app["Router"].process.remote().result()
    assert "specdiff_dist.engine.decode" in modules
    assert not {"torch", "transformers"} & set(modules)


def test_an_exact_tier_that_this_drafter_makes_inexact_refuses_to_start(serve_port):
    broken = role_application(load_drafter=load_dishonest_drafter)
    with pytest.raises(RuntimeError):
        serve.run(broken, name="dishonest", route_prefix=None)
    message = serve.status().applications["dishonest"].deployments["Router"].message
    serve.delete("dishonest")
    assert "InexactConfig" in message and "trap 3" in message


def test_a_router_that_dies_gives_its_places_back(app):
    """Ray leaves a stream open whose caller was killed; the replicas watch their callers themselves."""
    answer = Answer(app["Router"], make_request(PROMPT, max_tokens=1500))
    answer.read(3)
    pid, _ = app["Router"].process.remote().result()
    os.kill(pid, signal.SIGKILL)
    assert seconds_until(lambda: nothing_held(app)) < 5.0  # polled every second
    with pytest.raises(RayError):
        answer.read()
    seconds_until(lambda: app["Router"].process.remote().result()[0] != pid, 20)
    assert Answer(app["Router"], make_request(PROMPT, max_tokens=5)).read() == plain_greedy(table(), PROMPT, 5)


def load_dishonest_drafter() -> TableDrafter:
    return TableDrafter(VOCAB_SIZE, dishonest=True)


def np_int32(values):
    return np.array(values, np.int32)


def np_float64(length):
    return np.zeros(length, np.float64)
