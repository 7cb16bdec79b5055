"""`specdiff bench wire`: the same rounds over gRPC and over Serve handles, in turns, on a Ray of its own."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from ray import serve

from deployments.bench_app import running_ray
from deployments.builder import role_options
from deployments.endpoints import GrpcEndpoint, HandleEndpoint
from deployments.settings import AppSettings
from specdiff_dist.bench.wire import PreparedDrafter, PreparedVerifier, Shape
from specdiff_dist.bench.wire_rounds import WireRound
from specdiff_dist.errors import VerifierUnavailable
from specdiff_dist.roles import Drafter, Verifier
from specdiff_dist.transport.grpc_client import GrpcDrafter, GrpcVerifier
from specdiff_dist.transport.grpc_server import start_server
from specdiff_dist.transport.handle_client import HandleChannel, HandleDrafter, HandleVerifier, Send
from specdiff_dist.transport.remote_roles import RemoteVerifier
from specdiff_dist.transport.role_service import drafter_service, verifier_service

APP = "specdiff-bench-wire"
SERVICES = {
    "Drafter": lambda shape, rounds: drafter_service(PreparedDrafter(shape, rounds)),
    "Verifier": lambda shape, rounds: verifier_service(PreparedVerifier(shape, rounds)),
}
REFERENCE_SIZES = (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)  # bytes of a call

Roles = tuple[Drafter, Verifier]


@serve.deployment(logging_config={"enable_access_log": False}, ray_actor_options={"num_cpus": 0.1})
class PreparedRole:
    """One role of prepared engines, one engine a case, behind a port and behind the handle at once."""

    def __init__(self, role: str, shape: Shape, cases: Mapping[str, Sequence[WireRound]]) -> None:
        self._role = role
        self._services = {name: SERVICES[role](shape, rounds) for name, rounds in cases.items()}
        self._servers: list[Any] = []

    async def open(self, case: str) -> tuple[str, str]:
        """The gRPC address, and the replica's id in Serve."""
        server = await start_server(self._role, self._services[case], "127.0.0.1", 0)
        self._servers.append(server)
        return GrpcEndpoint(self._role, server).address, HandleEndpoint(self._services[case]).address

    async def call(self, method: str, request: bytes, *, case: str) -> bytes:
        return await HandleEndpoint(self._services[case]).answer(method, request)


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Both:
    """Serve runs one application: this holds its two roles."""

    def __init__(self, drafter: Any, verifier: Any) -> None:
        """Serve wants the handles bound; they are looked up by name."""


def measure_transports(
    shape: Shape, cases: Mapping[str, Sequence[WireRound]], *, num_runs: int, progress: Callable[[], object]
) -> tuple[dict[str, dict[str, float]], list[dict[str, float]]]:
    """Per case `grpc_ms` and `handle_ms`: medians of a round, both calls one after the other, as a router sees them. And
    per size of a call `inline_ms` and `reference_ms`: a verify call over handles without and with the object store.

    `progress` is called `len(cases) * num_runs` times.
    """
    with running_ray(proxy_location="Disabled"), running_roles(shape, cases) as handles:
        return asyncio.run(measure_rounds(handles, cases, num_runs, progress))


@contextmanager
def running_roles(shape: Shape, cases: Mapping[str, Sequence[WireRound]]) -> Iterator[dict[str, Any]]:
    """Handles of both roles, on the Ray that is running."""
    options = {**role_options(AppSettings(transport="handle")), "health_check_period_s": 10.0}
    roles = {name: PreparedRole.options(name=name, **options).bind(name, shape, cases) for name in SERVICES}
    serve.run(Both.bind(*roles.values()), name=APP, route_prefix=None)
    try:
        yield {name: serve.get_deployment_handle(name, APP) for name in SERVICES}
    finally:
        serve.delete(APP)


async def measure_rounds(
    handles: Mapping[str, Any], cases: Mapping[str, Sequence[WireRound]], num_runs: int, progress: Callable[[], object]
) -> tuple[dict[str, dict[str, float]], list[dict[str, float]]]:
    """See measure_transports."""
    times = {}
    for case, rounds in cases.items():
        transports, _ = await _connect(handles, case)
        times[case] = await _alternate(transports, rounds, num_runs, progress)
    first, rounds = next(iter(cases.items()))
    _, send = await _connect(handles, first)
    return times, await _by_size(send, rounds[0], max(num_runs // 5, 5))


async def _connect(handles: Mapping[str, Any], case: str) -> tuple[dict[str, Roles], Send]:
    """Both transports to the replicas of a case; and the way of a handle call to its verifier."""
    ports, sends = {}, {}
    for name, handle in handles.items():
        ports[name], replica_id = await handle.open.remote(case)
        at_replica = handle.options(method_name="call", session_id=replica_id)
        sends[name] = _send(at_replica, case)
    return {
        "grpc": (GrpcDrafter(ports["Drafter"]), GrpcVerifier(ports["Verifier"])),
        "handle": (HandleDrafter(sends["Drafter"]), HandleVerifier(sends["Verifier"])),
    }, sends["Verifier"]


def _send(handle: Any, case: str) -> Send:
    return lambda method, request: handle.remote(method, request, case=case)


async def _alternate(
    transports: Mapping[str, Roles], rounds: Sequence[WireRound], num_runs: int, progress: Callable[[], object]
) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in transports}
    for run in range(num_runs):
        one = rounds[run % len(rounds)]
        for name, (drafter, verifier) in transports.items():
            started = perf_counter()
            await drafter.draft(one.draft_call)
            await verifier.verify(one.verify_call)
            if run:  # the first opens connections
                times[name].append(perf_counter() - started)
        progress()
    return {f"{name}_ms": 1e3 * median(seconds) for name, seconds in times.items()}


async def _by_size(send: Send, one: WireRound, num_runs: int) -> list[dict[str, float]]:
    ways = {
        "inline_ms": RemoteVerifier(HandleChannel(send, VerifierUnavailable, by_reference_bytes=1 << 60)),
        "reference_ms": RemoteVerifier(HandleChannel(send, VerifierUnavailable, by_reference_bytes=0)),
    }
    found = []
    for size in REFERENCE_SIZES:
        prompt = np.zeros(size // 4, np.int32)
        prefix = dataclasses.replace(one.verify_call.prefix, new_token_ids=prompt)
        call = dataclasses.replace(one.verify_call, prefix=prefix)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(num_runs):
            for way, verifier in ways.items():
                started = perf_counter()
                await verifier.verify(call)
                times[way].append(perf_counter() - started)
        found.append({"bytes": size, **{way: 1e3 * median(seconds) for way, seconds in times.items()}})
    return found
