"""The transports under one roof: every contract test runs over each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from specdiff_dist.transport.channel_pool import ChannelPool
from specdiff_dist.transport.grpc_client import GrpcDrafter, GrpcVerifier
from specdiff_dist.transport.grpc_server import start_drafter_server, start_verifier_server
from specdiff_dist.transport.local import LocalDrafter, LocalVerifier


class LocalTransport:
    """Roles in this process."""

    name = "local"

    def __init__(self) -> None:
        self._stack = AsyncExitStack()

    async def drafter(self, engine: Any, **options: Any) -> LocalDrafter:
        role = LocalDrafter(engine, **options)
        self._stack.push_async_callback(role.close)
        return role

    async def verifier(self, engine: Any, **options: Any) -> LocalVerifier:
        role = LocalVerifier(engine, **options)
        self._stack.push_async_callback(role.close)
        return role

    async def close(self) -> None:
        await self._stack.aclose()


class GrpcTransport:
    """Roles over a real port of this machine."""

    name = "grpc"

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._pool = ChannelPool()
        self._stack.push_async_callback(self._pool.close)

    async def drafter(self, engine: Any, **options: Any) -> GrpcDrafter:
        server = await start_drafter_server(engine, **options)
        self._stack.push_async_callback(server.stop, 0)
        return GrpcDrafter(server.address, pool=self._pool)

    async def verifier(self, engine: Any, **options: Any) -> GrpcVerifier:
        server = await start_verifier_server(engine, **options)
        self._stack.push_async_callback(server.stop, 0)
        return GrpcVerifier(server.address, pool=self._pool)

    async def close(self) -> None:
        await self._stack.aclose()


@pytest.fixture(params=[LocalTransport, GrpcTransport], ids=lambda transport: transport.name)
async def transport(request: pytest.FixtureRequest) -> AsyncIterator[LocalTransport | GrpcTransport]:
    opened = request.param()
    yield opened
    await opened.close()
