"""One engine behind a port.

The port carries no credentials: bind it to an address that only the cluster's own pods can reach.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

import grpc

from specdiff_dist.errors import InvalidRequest, SpecdiffError
from specdiff_dist.pb import roles_pb2 as pb
from specdiff_dist.roles import DrafterEngine, VerifierEngine
from specdiff_dist.transport import codec
from specdiff_dist.transport.checks import check_draft_call, check_resolve_call, check_verify_call
from specdiff_dist.transport.engine_thread import DEFAULT_MAX_QUEUED, EngineThread, drafter_thread, verifier_thread
from specdiff_dist.transport.grpc_errors import DETAIL_KEY, to_status
from specdiff_dist.transport.grpc_options import MAX_MESSAGE_BYTES, SERVER_OPTIONS, join_address

log = logging.getLogger(__name__)

Handler = Callable[[bytes], Awaitable[bytes]]  # serialised request -> serialised reply; raises SpecdiffError


class RoleServer:
    """A running server. Belongs to the event loop it was started in."""

    def __init__(
        self,
        engine: DrafterEngine | VerifierEngine,
        server: grpc.aio.Server,
        thread: EngineThread,
        host: str,
        port: int,
    ) -> None:
        self.engine = engine
        self.port = port
        self.address = join_address(host, port)
        self._server = server
        self._thread = thread

    @property
    def num_queued(self) -> int:
        """Calls that wait for the engine or run in it right now."""
        return self._thread.num_queued

    async def stop(self, grace: float | None = 5.0) -> None:
        """Refuses new calls, lets running ones end for `grace` seconds, then cuts them off. Safe to call again."""
        await self._server.stop(grace)
        self._thread.close()


async def start_drafter_server(
    engine: DrafterEngine, *, host: str = "127.0.0.1", port: int = 0, max_queued: int = DEFAULT_MAX_QUEUED
) -> RoleServer:
    """Serves `engine`; port 0 takes any free one. Raises OSError when the port cannot be bound."""
    thread, run_draft = drafter_thread(engine, max_queued=max_queued)
    engine_info = engine.info

    async def info(request: bytes) -> bytes:
        return codec.encode_drafter_info(engine_info)

    async def draft(request: bytes) -> bytes:
        call = codec.decode_draft_call(request)
        check_draft_call(call, engine_info)
        return codec.encode_draft_block(await run_draft(call))

    async def release(request: bytes) -> bytes:
        await thread.release(engine.release, codec.decode_release(request))
        return b""

    handlers = {"Info": info, "Draft": draft, "Release": release}
    server, bound = await start_service("Drafter", handlers, host, port)
    return RoleServer(engine, server, thread, host, bound)


async def start_verifier_server(
    engine: VerifierEngine, *, host: str = "127.0.0.1", port: int = 0, max_queued: int = DEFAULT_MAX_QUEUED
) -> RoleServer:
    """Serves `engine`; port 0 takes any free one. Raises OSError when the port cannot be bound."""
    thread, run_verify = verifier_thread(engine, max_queued=max_queued)
    engine_info = engine.info

    async def info(request: bytes) -> bytes:
        return codec.encode_verifier_info(engine_info)

    async def verify(request: bytes) -> bytes:
        call = codec.decode_verify_call(request)
        check_verify_call(call, engine_info)
        return codec.encode_target_rows(await run_verify(call))

    async def resolve(request: bytes) -> bytes:
        call = codec.decode_resolve_call(request)
        check_resolve_call(call, engine_info)
        return codec.encode_resolved(await thread.call(engine.resolve, call, session_id=call.session_id))

    async def release(request: bytes) -> bytes:
        await thread.release(engine.release, codec.decode_release(request))
        return b""

    handlers = {"Info": info, "Verify": verify, "Resolve": resolve, "Release": release}
    server, bound = await start_service("Verifier", handlers, host, port)
    return RoleServer(engine, server, thread, host, bound)


async def start_service(
    service: str, handlers: Mapping[str, Handler], host: str, port: int
) -> tuple[grpc.aio.Server, int]:
    """Serves the methods of `service` by name, whatever stands behind them. Returns the server and the port it got; port 0
    takes any free one. Raises OSError when the port cannot be bound."""
    full_name = pb.DESCRIPTOR.services_by_name[service].full_name
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(
                full_name,
                # Without (de)serialisers gRPC hands us bytes: only then is a malformed message ours to answer.
                {
                    method: grpc.unary_unary_rpc_method_handler(_answering(handler))
                    for method, handler in handlers.items()
                },
            )
        ]
    )
    try:
        bound = server.add_insecure_port(join_address(host, port))
    except RuntimeError as error:
        raise OSError(f"cannot listen on {join_address(host, port)}; is the port taken?") from error
    await server.start()
    return server, bound


def _answering(handler: Handler) -> Callable[[bytes, grpc.aio.ServicerContext], Awaitable[bytes]]:
    """`handler` with its errors turned into statuses, so that no caller waits for an answer that never comes."""

    async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            reply = await handler(request)
            if len(reply) > MAX_MESSAGE_BYTES:
                raise InvalidRequest(f"the reply takes {len(reply)} bytes; the limit is {MAX_MESSAGE_BYTES}")
        except SpecdiffError as error:
            failure = error
        except asyncio.CancelledError:
            raise  # the client is gone, or the server stops: gRPC has already told the client
        except Exception as error:
            log.exception("a call could not be answered")
            failure = SpecdiffError(f"the replica failed with {type(error).__name__}; its log says more")
        else:
            return reply
        status, detail = to_status(failure)
        return await context.abort(status, detail.message, ((DETAIL_KEY, detail.SerializeToString()),))

    return answer
