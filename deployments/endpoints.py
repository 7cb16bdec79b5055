"""Where a replica's engine can be called: a gRPC port of its own, or the replica's Serve handle."""

from __future__ import annotations

from typing import Protocol

import ray
from ray import serve

from deployments.settings import Transport
from specdiff_dist.errors import DrafterUnavailable, InvalidConfig, VerifierUnavailable
from specdiff_dist.roles import DrafterEngine, VerifierEngine
from specdiff_dist.transport.grpc_client import GrpcChannel
from specdiff_dist.transport.grpc_server import RoleServer, start_server
from specdiff_dist.transport.handle_messages import answer_handle
from specdiff_dist.transport.role_service import RoleService

CHECK_DEADLINE_S = 10.0


class Endpoint(Protocol):
    """One replica's engine, open to calls."""

    address: str
    """What a lease names it by: host:port of its gRPC server, or the replica's id in Serve."""

    @property
    def engine(self) -> DrafterEngine | VerifierEngine: ...

    async def release(self, session_id: str) -> None:
        """Frees the session's cache, behind any call of it that still runs. Never raises."""
        ...

    async def check(self) -> None:
        """Fails when it does not answer."""
        ...

    async def answer(self, method: str, request: bytes) -> bytes:
        """The packed reply to a handle call."""
        ...


class GrpcEndpoint:
    """A gRPC server."""

    def __init__(self, role: str, server: RoleServer) -> None:
        self.address, self.engine = server.address, server.engine
        self._role, self._server = role, server

    async def release(self, session_id: str) -> None:
        await self._server.release(session_id)

    async def check(self) -> None:
        """Over a new connection."""
        unavailable = DrafterUnavailable if self._role == "Drafter" else VerifierUnavailable
        channel = GrpcChannel(self.address, self._role, unavailable, None)
        try:
            await channel.call("Info", b"", CHECK_DEADLINE_S)
        finally:
            await channel.close()

    async def answer(self, method: str, request: bytes) -> bytes:
        """Refused: sessions of the two transports would not see each other's leases end."""
        raise InvalidConfig(f"this replica is called by gRPC at {self.address}; its application sets transport=grpc")


class HandleEndpoint:
    """The handle of the Serve replica this is called in. It opens no port."""

    def __init__(self, service: RoleService) -> None:
        self.address = serve.get_replica_context().replica_id.unique_id
        self.engine = service.engine
        self._service = service

    async def release(self, session_id: str) -> None:
        await self._service.release(session_id)

    async def check(self) -> None:
        """Nothing to do: Serve's asking shows that handle calls arrive."""

    async def answer(self, method: str, request: bytes) -> bytes:
        return await answer_handle(self._service, method, request)


async def open_endpoint(role: str, service: RoleService, transport: Transport, grpc_host: str) -> Endpoint:
    """`role`: Drafter or Verifier. Raises OSError when the port cannot be bound."""
    if transport == "handle":
        return HandleEndpoint(service)
    return GrpcEndpoint(role, await start_server(role, service, listen_host(grpc_host), 0))


def listen_host(grpc_host: str) -> str:
    """The address for a replica's port that `AppSettings.grpc_host` means on this machine."""
    if grpc_host not in ("auto", "node"):
        return grpc_host
    is_alone = grpc_host == "auto" and sum(node["Alive"] for node in ray.nodes()) == 1
    return "127.0.0.1" if is_alone else ray.util.get_node_ip_address()
