"""One engine behind a port.

The port carries no credentials: bind it to an address that only the cluster's own pods can reach.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import grpc

from specdiff_dist.errors import SpecdiffError
from specdiff_dist.pb import roles_pb2 as pb
from specdiff_dist.roles import DrafterEngine, VerifierEngine
from specdiff_dist.transport.engine_thread import DEFAULT_MAX_QUEUED
from specdiff_dist.transport.grpc_errors import DETAIL_KEY, to_status
from specdiff_dist.transport.grpc_options import SERVER_OPTIONS, join_address
from specdiff_dist.transport.role_service import Handler, RoleService, answer, drafter_service, verifier_service
from specdiff_dist.transport.stream_server import StreamServer


class RoleServer:
    """A running server. Belongs to the event loop it was started in."""

    def __init__(
        self, service: RoleService, server: grpc.aio.Server, streams: StreamServer, host: str, port: int
    ) -> None:
        self.engine = service.engine
        self.port = port
        self.address = join_address(host, port)
        self._server, self._streams = server, streams
        self._service = service

    @property
    def num_queued(self) -> int:
        """Calls that wait for the engine or run in it right now."""
        return self._service.num_queued

    async def release(self, session_id: str) -> None:
        """Frees the session's cache, behind any call of it that still runs. Never raises."""
        await self._service.release(session_id)

    async def stop(self, grace: float | None = 5.0) -> None:
        """Refuses new calls, lets running ones end for `grace` seconds, then cuts them off. Safe to call again."""
        self._streams.close()
        await self._server.stop(grace)
        self._service.close()


async def start_drafter_server(
    engine: DrafterEngine, *, host: str = "127.0.0.1", port: int = 0, max_queued: int = DEFAULT_MAX_QUEUED
) -> RoleServer:
    """Serves `engine`; port 0 takes any free one. Raises OSError when the port cannot be bound."""
    return await start_server("Drafter", drafter_service(engine, max_queued=max_queued), host, port)


async def start_verifier_server(
    engine: VerifierEngine, *, host: str = "127.0.0.1", port: int = 0, max_queued: int = DEFAULT_MAX_QUEUED
) -> RoleServer:
    """Serves `engine`; port 0 takes any free one. Raises OSError when the port cannot be bound."""
    return await start_server("Verifier", verifier_service(engine, max_queued=max_queued), host, port)


async def start_server(role: str, service: RoleService, host: str, port: int) -> RoleServer:
    """Serves the methods of `service`, a Drafter's or a Verifier's. Raises OSError when the port cannot be bound."""
    server, streams, bound = await start_service(role, service.handlers, host, port)
    return RoleServer(service, server, streams, host, bound)


async def start_service(
    service: str, handlers: Mapping[str, Handler], host: str, port: int
) -> tuple[grpc.aio.Server, StreamServer, int]:
    """Serves the methods of `service` by name, whatever stands behind them. Returns the server, its streams (to be closed
    before it is stopped) and the port it got; port 0 takes any free one. Raises OSError when the port cannot be bound."""
    full_name = pb.DESCRIPTOR.services_by_name[service].full_name
    server, streams = grpc.aio.server(options=SERVER_OPTIONS), StreamServer(handlers)
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(
                full_name,
                # Without (de)serialisers gRPC hands us bytes: only then is a malformed message ours to answer.
                {
                    **{
                        method: grpc.unary_unary_rpc_method_handler(_answering(handler))
                        for method, handler in handlers.items()
                    },
                    "Calls": grpc.stream_stream_rpc_method_handler(streams.serve),
                },
            )
        ]
    )
    try:
        bound = server.add_insecure_port(join_address(host, port))
    except RuntimeError as error:
        raise OSError(f"cannot listen on {join_address(host, port)}; is the port taken?") from error
    await server.start()
    return server, streams, bound


def _answering(handler: Handler) -> Callable[[bytes, grpc.aio.ServicerContext], Awaitable[bytes]]:
    """`handler` with its errors turned into statuses. (A CancelledError passes: the client is gone, or the server stops, and
    gRPC has already told the client.)"""

    async def answer_grpc(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            return await answer(handler, request)
        except SpecdiffError as error:
            status, detail = to_status(error)
            return await context.abort(status, detail.message, ((DETAIL_KEY, detail.SerializeToString()),))

    return answer_grpc
