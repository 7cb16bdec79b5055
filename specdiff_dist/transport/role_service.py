"""One engine behind named methods that take and give bytes: what every transport to another process serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from specdiff_dist.errors import InvalidRequest, SpecdiffError
from specdiff_dist.roles import DrafterEngine, VerifierEngine
from specdiff_dist.transport import codec
from specdiff_dist.transport.checks import check_draft_call, check_resolve_call, check_verify_call
from specdiff_dist.transport.engine_thread import DEFAULT_MAX_QUEUED, EngineThread, drafter_thread, verifier_thread

MAX_MESSAGE_BYTES = 64 << 20  # both ways. Dense float32 rows of a 152k vocabulary at block 16 are 10 MB; ours are KB

Handler = Callable[[bytes], Awaitable[bytes]]  # serialised request -> serialised reply; raises SpecdiffError

log = logging.getLogger(__name__)


async def answer(handler: Handler, request: bytes) -> bytes:
    """The serialised reply. Raises SpecdiffError whatever goes wrong, so that no caller waits for an answer that never comes;
    and CancelledError when the caller is gone."""
    try:
        reply = await handler(request)
    except (SpecdiffError, asyncio.CancelledError):
        raise
    except Exception as error:
        log.exception("a call could not be answered")
        raise SpecdiffError(f"the replica failed with {type(error).__name__}; its log says more") from error
    if len(reply) > MAX_MESSAGE_BYTES:
        raise InvalidRequest(f"the reply takes {len(reply)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    return reply


class RoleService:
    """The methods of one engine, and the thread it runs in."""

    def __init__(
        self, engine: DrafterEngine | VerifierEngine, thread: EngineThread, handlers: Mapping[str, Handler]
    ) -> None:
        self.engine = engine
        self.handlers = handlers
        self._thread = thread

    @property
    def num_queued(self) -> int:
        """Calls that wait for the engine or run in it right now."""
        return self._thread.num_queued

    async def answer(self, method: str, request: bytes) -> bytes:
        """See `answer`."""
        handler = self.handlers.get(method)
        if handler is None:
            raise InvalidRequest(f"there is no method {method!r}; there are {', '.join(self.handlers)}")
        return await answer(handler, request)

    async def release(self, session_id: str) -> None:
        """Frees the session's cache, behind any call of it that still runs. Never raises."""
        await self._thread.release(self.engine.release, session_id)

    def close(self) -> None:
        """Drops calls that wait; one that runs still finishes."""
        self._thread.close()


def drafter_service(engine: DrafterEngine, *, max_queued: int = DEFAULT_MAX_QUEUED) -> RoleService:
    """Draft calls to `engine`."""
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

    return RoleService(engine, thread, {"Info": info, "Draft": draft, "Release": release})


def verifier_service(engine: VerifierEngine, *, max_queued: int = DEFAULT_MAX_QUEUED) -> RoleService:
    """Verify calls to `engine`."""
    thread, run_verify = verifier_thread(engine, max_queued=max_queued)
    engine_info = engine.info

    async def info(request: bytes) -> bytes:
        return codec.encode_verifier_info(engine_info)

    async def verify(request: bytes) -> bytes:
        call = codec.decode_verify_call(request)
        check_verify_call(call, engine_info)
        return codec.encode_target_rows(await run_verify(call), call.proposals)

    async def resolve(request: bytes) -> bytes:
        call = codec.decode_resolve_call(request)
        check_resolve_call(call, engine_info)
        return codec.encode_resolved(await thread.call(engine.resolve, call, session_id=call.session_id))

    async def release(request: bytes) -> bytes:
        await thread.release(engine.release, codec.decode_release(request))
        return b""

    return RoleService(engine, thread, {"Info": info, "Verify": verify, "Resolve": resolve, "Release": release})
