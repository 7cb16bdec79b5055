"""The transports under one roof: every contract test runs over each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from specdiff_dist.roles import Drafter, Verifier
from specdiff_dist.transport.channel_pool import ChannelPool
from specdiff_dist.transport.grpc_client import GrpcDrafter, GrpcVerifier
from specdiff_dist.transport.grpc_server import RoleServer, start_drafter_server, start_verifier_server
from specdiff_dist.transport.local import LocalDrafter, LocalVerifier


class LocalTransport:
    """Roles in this process."""

    name = "local"

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._queues: list[Any] = []

    @property
    def num_queued(self) -> int:
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


@pytest.fixture(params=[LocalTransport, GrpcTransport], ids=lambda transport: transport.name)
async def transport(request: pytest.FixtureRequest) -> AsyncIterator[LocalTransport]:
    opened = request.param()
    yield opened
    await opened.close()
