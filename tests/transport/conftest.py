"""The transports under one roof: every contract test runs over each of them."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from specdiff_dist.roles import Drafter, Verifier
from specdiff_dist.transport.channel_pool import ChannelPool
from specdiff_dist.transport.grpc_client import GrpcDrafter, GrpcVerifier
from specdiff_dist.transport.grpc_server import RoleServer, start_drafter_server, start_verifier_server
from specdiff_dist.transport.local import LocalDrafter, LocalVerifier

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from specdiff_dist.transport.handle_client import Send


class LocalTransport:
    """Roles in this process."""

    name = "local"

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._queues: list[Any] = []

    async def num_queued(self) -> int:
        """Calls that have arrived at any engine and are not answered."""
        return sum(queue.num_queued for queue in self._queues)

    async def drafter(self, engine: Any, **options: Any) -> Drafter:
        return self._opened(LocalDrafter(engine, **options))

    async def verifier(self, engine: Any, **options: Any) -> Verifier:
        return self._opened(LocalVerifier(engine, **options))

    async def close(self) -> None:
        await self._stack.aclose()

    def _opened(self, role: Any) -> Any:
        self._queues.append(role)
        self._stack.push_async_callback(role.close)
        return role


class GrpcTransport(LocalTransport):
    """Roles over a real port of this machine."""

    name = "grpc"

    def __init__(self) -> None:
        super().__init__()
        self._pool = ChannelPool()
        self._stack.push_async_callback(self._pool.close)

    async def drafter(self, engine: Any, **options: Any) -> Drafter:
        return GrpcDrafter(self._served(await start_drafter_server(engine, **options)), pool=self._pool)

    async def verifier(self, engine: Any, **options: Any) -> Verifier:
        return GrpcVerifier(self._served(await start_verifier_server(engine, **options)), pool=self._pool)

    def _served(self, server: RoleServer) -> str:
        self._queues.append(server)
        self._stack.push_async_callback(server.stop, 0)
        return server.address


class HandleTransport(LocalTransport):
    """Roles over handles of real Serve replicas; their engines stay here (handle_host.py)."""

    name = "handle"

    def __init__(self, host: DeploymentHandle) -> None:
        super().__init__()
        self._host = host

    async def num_queued(self) -> int:
        return sum([await host.num_queued.remote(key) for key, host in self._queues])

    async def drafter(self, engine: Any, **options: Any) -> Drafter:
        from specdiff_dist.transport.handle_client import HandleDrafter

        return HandleDrafter(await self._send("Drafter", engine, options))

    async def verifier(self, engine: Any, **options: Any) -> Verifier:
        from specdiff_dist.transport.handle_client import HandleVerifier

        return HandleVerifier(await self._send("Verifier", engine, options))

    async def _send(self, role: str, engine: Any, options: dict[str, Any]) -> Send:
        from tests.transport.handle_host import EngineAtHome

        home = EngineAtHome(engine)
        self._stack.callback(home.close)
        key = str(uuid.uuid4())
        replica_id = await self._host.open.remote(key, role, home.address, options)
        host = self._host.options(session_id=replica_id)
        self._queues.append((key, host))
        self._stack.push_async_callback(self._close, key, host)
        return partial(host.call.remote, key=key)

    async def _close(self, key: str, host: DeploymentHandle) -> None:
        await host.close.remote(key)


@pytest.fixture(scope="session")
def handle_host(serve_port: int) -> Iterator[DeploymentHandle]:
    from ray import serve

    from tests.transport import handle_host

    yield handle_host.running_host()
    serve.delete(handle_host.APP)


@pytest.fixture(params=["local", "grpc", pytest.param("handle", marks=pytest.mark.ray)])
def open_transport(request: pytest.FixtureRequest) -> Callable[[], LocalTransport]:
    """Not a coroutine: Serve starts outside of any event loop."""
    if request.param == "handle":
        return partial(HandleTransport, request.getfixturevalue("handle_host"))
    return {"local": LocalTransport, "grpc": GrpcTransport}[request.param]


@pytest.fixture
async def transport(open_transport: Callable[[], LocalTransport]) -> AsyncIterator[LocalTransport]:
    opened = open_transport()
    yield opened
    await opened.close()
