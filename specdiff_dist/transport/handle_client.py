"""Roles over Serve handle calls: the second transport. No replica opens a port, and Ray's authentication and TLS apply.

Nothing of ours is pickled: what crosses are strings and bytes, which Ray carries as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from specdiff_dist.errors import DrafterUnavailable, VerifierUnavailable
from specdiff_dist.transport.error_detail import Unavailable
from specdiff_dist.transport.handle_messages import unpack_reply
from specdiff_dist.transport.remote_roles import (
    DRAFT_DEADLINE_S,
    PREFILL_S_PER_1K_TOKENS,
    VERIFY_DEADLINE_S,
    RemoteDrafter,
    RemoteVerifier,
)

BY_REFERENCE_BYTES = 100 << 10
"""Calls at least as long go into the object store once and travel as a reference. Measured (`specdiff bench wire`): a
reference costs shorter ones 1 to 2 ms, and longer ones nothing, as Ray would put them there at every attempt. It does so
with replies by itself."""

Send = Callable[[str, Any], Any]
"""(method, request as bytes or a reference to them) -> a DeploymentResponse of the packed reply, from one replica."""


class HandleChannel:
    """Calls the one replica that `send` reaches."""

    def __init__(self, send: Send, unavailable: Unavailable, *, by_reference_bytes: int = BY_REFERENCE_BYTES) -> None:
        self._send, self._by_reference_bytes = send, by_reference_bytes
        self._unavailable: Unavailable = unavailable
        self._is_open = True

    async def call(self, method: str, request: bytes, deadline_s: float) -> bytes:
        """See Channel.call."""
        if not self._is_open:
            raise self._unavailable("the channel is closed")
        response: Any = None
        try:
            # In a context of its own, in which it is nobody's child: Ray cancels the calls of a cancelled request.
            argument = ray.put(request) if len(request) >= self._by_reference_bytes else request
            response = Context().run(self._send, method, argument)
            async with asyncio.timeout(deadline_s):
                data = await response
        except TimeoutError as error:
            response.cancel()
            raise self._unavailable(f"no answer: DEADLINE_EXCEEDED: {deadline_s:g} s") from error
        except (RayError, RayServeException) as error:
            raise self._unavailable(f"no answer: UNAVAILABLE: {type(error).__name__}") from error
        except asyncio.CancelledError as error:
            if response is not None:
                response.cancel()
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self._unavailable("the call was cancelled by Serve") from error
        return unpack_reply(data, self._unavailable)

    async def close(self) -> None:
        """Later calls fail; safe to call again."""
        self._is_open = False


class HandleDrafter(RemoteDrafter):
    """A Drafter behind `send`."""

    def __init__(
        self,
        send: Send,
        *,
        deadline_s: float = DRAFT_DEADLINE_S,
        prefill_s_per_1k_tokens: float = PREFILL_S_PER_1K_TOKENS,
    ) -> None:
        channel = HandleChannel(send, DrafterUnavailable)
        super().__init__(channel, deadline_s=deadline_s, prefill_s_per_1k_tokens=prefill_s_per_1k_tokens)


class HandleVerifier(RemoteVerifier):
    """A Verifier behind `send`."""

    def __init__(
        self,
        send: Send,
        *,
        deadline_s: float = VERIFY_DEADLINE_S,
        prefill_s_per_1k_tokens: float = PREFILL_S_PER_1K_TOKENS,
    ) -> None:
        channel = HandleChannel(send, VerifierUnavailable)
        super().__init__(channel, deadline_s=deadline_s, prefill_s_per_1k_tokens=prefill_s_per_1k_tokens)
