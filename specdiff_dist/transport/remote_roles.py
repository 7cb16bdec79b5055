"""Roles over a channel that carries bytes: everything that the transports to another process share."""

from __future__ import annotations

import dataclasses
import logging
from time import perf_counter
from typing import Protocol

from specdiff_dist.errors import InvalidRequest, SpecdiffError
from specdiff_dist.transport import codec
from specdiff_dist.transport.checks import check_draft_block, check_resolved, check_target_rows
from specdiff_dist.transport.role_service import MAX_MESSAGE_BYTES
from specdiff_dist.types import (
    CallCost,
    DraftBlock,
    DraftCall,
    DrafterInfo,
    PrefixStatement,
    ResolveCall,
    ResolvedToken,
    TargetRows,
    VerifierInfo,
    VerifyCall,
)

DRAFT_DEADLINE_S = 10.0
VERIFY_DEADLINE_S = 60.0
PREFILL_S_PER_1K_TOKENS = 10.0  # allowed on top per 1000 new committed tokens
INFO_DEADLINE_S = 10.0
RELEASE_DEADLINE_S = 5.0

log = logging.getLogger(__name__)


class Channel(Protocol):
    """The way to one replica."""

    async def call(self, method: str, request: bytes, deadline_s: float) -> bytes:
        """The serialised reply. Raises what the replica raised, or the role's Unavailable when it gives no answer."""
        ...

    async def close(self) -> None:
        """Later calls raise the role's Unavailable; safe to call again."""
        ...


class RemoteRole:
    """What both roles have in common."""

    def __init__(self, channel: Channel, deadline_s: float, prefill_s_per_1k_tokens: float) -> None:
        self._channel = channel
        self._deadline_s = deadline_s
        self._prefill_s_per_1k_tokens = prefill_s_per_1k_tokens

    async def release(self, session_id: str) -> None:
        """Never raises (cancellation apart): a replica that misses it drops the session when it needs the room."""
        try:
            await self._call("Release", codec.encode_release(session_id), RELEASE_DEADLINE_S)
        except SpecdiffError as error:
            log.debug("releasing a session failed: %s", error)

    async def close(self) -> None:
        """Gives the channel back; safe to call again."""
        await self._channel.close()

    async def _call(self, method: str, request: bytes, deadline_s: float) -> bytes:
        if len(request) > MAX_MESSAGE_BYTES:
            raise InvalidRequest(f"the call takes {len(request)} bytes; the limit is {MAX_MESSAGE_BYTES}")
        return await self._channel.call(method, request, deadline_s)

    def _deadline(self, prefix: PrefixStatement) -> float:
        return self._deadline_s + self._prefill_s_per_1k_tokens * len(prefix.new_token_ids) / 1000


class RemoteDrafter(RemoteRole):
    """A Drafter."""

    def __init__(
        self,
        channel: Channel,
        *,
        deadline_s: float = DRAFT_DEADLINE_S,
        prefill_s_per_1k_tokens: float = PREFILL_S_PER_1K_TOKENS,
    ) -> None:
        super().__init__(channel, deadline_s, prefill_s_per_1k_tokens)
        self._info: DrafterInfo | None = None

    async def info(self) -> DrafterInfo:
        """Asked once, then remembered."""
        if self._info is None:
            self._info = codec.decode_drafter_info(await self._call("Info", b"", INFO_DEADLINE_S))
        return self._info

    async def draft(self, call: DraftCall) -> DraftBlock:
        started = perf_counter()
        info = await self.info()
        request = codec.encode_draft_call(call)
        reply = await self._call("Draft", request, self._deadline(call.prefix))
        block = codec.decode_draft_block(reply)
        check_draft_block(block, call, info)
        return dataclasses.replace(block, cost=_seen_from_here(block.cost, started, request, reply))


class RemoteVerifier(RemoteRole):
    """A Verifier."""

    def __init__(
        self,
        channel: Channel,
        *,
        deadline_s: float = VERIFY_DEADLINE_S,
        prefill_s_per_1k_tokens: float = PREFILL_S_PER_1K_TOKENS,
    ) -> None:
        super().__init__(channel, deadline_s, prefill_s_per_1k_tokens)
        self._info: VerifierInfo | None = None

    async def info(self) -> VerifierInfo:
        """Asked once, then remembered."""
        if self._info is None:
            self._info = codec.decode_verifier_info(await self._call("Info", b"", INFO_DEADLINE_S))
        return self._info

    async def verify(self, call: VerifyCall) -> TargetRows:
        started = perf_counter()
        info = await self.info()
        request = codec.encode_verify_call(call)
        reply = await self._call("Verify", request, self._deadline(call.prefix))
        target = codec.decode_target_rows(reply, call.proposals)
        check_target_rows(target, call, info)
        return dataclasses.replace(target, cost=_seen_from_here(target.cost, started, request, reply))

    async def resolve(self, call: ResolveCall) -> ResolvedToken:
        started = perf_counter()
        info = await self.info()
        request = codec.encode_resolve_call(call)
        reply = await self._call("Resolve", request, self._deadline_s)
        resolved = codec.decode_resolved(reply)
        check_resolved(resolved, info)
        return dataclasses.replace(resolved, cost=_seen_from_here(resolved.cost, started, request, reply))


def _seen_from_here(cost: CallCost, started: float, request: bytes, reply: bytes) -> CallCost:
    """The replica's cost with what only the caller knows."""
    return dataclasses.replace(
        cost, wall_s=perf_counter() - started, bytes_sent=len(request), bytes_received=len(reply)
    )
