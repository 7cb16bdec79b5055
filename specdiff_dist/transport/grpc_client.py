"""Roles over a channel."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from time import perf_counter

import grpc

from specdiff_dist.errors import DrafterUnavailable, InvalidRequest, SpecdiffError, VerifierUnavailable
from specdiff_dist.pb import roles_pb2 as pb
from specdiff_dist.transport import codec
from specdiff_dist.transport.channel_pool import ChannelPool
from specdiff_dist.transport.checks import check_draft_block, check_resolved, check_target_rows
from specdiff_dist.transport.grpc_errors import Unavailable, from_status
from specdiff_dist.transport.grpc_options import MAX_MESSAGE_BYTES
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


class RoleChannel:
    """Calls one service at one address, with our errors. Holds its channel until `close`."""

    def __init__(self, address: str, service: str, unavailable: Unavailable, pool: ChannelPool | None) -> None:
        self._address = address
        self._unavailable: Unavailable = unavailable
        self._owns_pool = pool is None
        self._pool = ChannelPool(max_idle=0) if pool is None else pool
        channel = self._pool.hold(address)
        self._is_open = True
        descriptor = pb.DESCRIPTOR.services_by_name[service]
        self._methods: dict[str, grpc.aio.UnaryUnaryMultiCallable] = {
            method.name: channel.unary_unary(f"/{descriptor.full_name}/{method.name}") for method in descriptor.methods
        }  # without (de)serialisers: bytes in, bytes out, so that their sizes are known

    async def call(self, method: str, request: bytes, deadline_s: float) -> bytes:
        """The serialised reply. Raises what the server raised, or the role's Unavailable when it gives no answer."""
        if len(request) > MAX_MESSAGE_BYTES:
            raise InvalidRequest(f"the call takes {len(request)} bytes; the limit is {MAX_MESSAGE_BYTES}")
        try:
            return await self._methods[method](request, timeout=deadline_s, wait_for_ready=False)
        except grpc.aio.AioRpcError as error:
            raise from_status(error, self._unavailable) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self._unavailable("the channel was closed during the call") from error
        except grpc.aio.UsageError as error:
            raise self._unavailable("the channel is closed") from error

    async def release(self, session_id: str) -> None:
        """Never raises (cancellation apart): a replica that misses it drops the session when it needs the room."""
        try:
            await self.call("Release", codec.encode_release(session_id), RELEASE_DEADLINE_S)
        except SpecdiffError as error:
            log.debug("releasing a session at %s failed: %s", self._address, error)

    async def close(self) -> None:
        """Gives the channel back; safe to call again."""
        if self._is_open:
            self._is_open = False
            await (self._pool.close() if self._owns_pool else self._pool.drop(self._address))


class GrpcDrafter:
    """A Drafter at `address` (host:port). With a `pool` its channel is shared, otherwise it is its own."""

    def __init__(
        self,
        address: str,
        *,
        pool: ChannelPool | None = None,
        deadline_s: float = DRAFT_DEADLINE_S,
        prefill_s_per_1k_tokens: float = PREFILL_S_PER_1K_TOKENS,
    ) -> None:
        self._channel = RoleChannel(address, "Drafter", DrafterUnavailable, pool)
        self._deadline_s = deadline_s
        self._prefill_s_per_1k_tokens = prefill_s_per_1k_tokens
        self._info: DrafterInfo | None = None

    async def info(self) -> DrafterInfo:
        """Asked once, then remembered."""
        if self._info is None:
            self._info = codec.decode_drafter_info(await self._channel.call("Info", b"", INFO_DEADLINE_S))
        return self._info

    async def draft(self, call: DraftCall) -> DraftBlock:
        started = perf_counter()
        info = await self.info()
        request = codec.encode_draft_call(call)
        deadline_s = _deadline(call.prefix, self._deadline_s, self._prefill_s_per_1k_tokens)
        reply = await self._channel.call("Draft", request, deadline_s)
        block = codec.decode_draft_block(reply)
        check_draft_block(block, call, info)
        return dataclasses.replace(block, cost=_seen_from_here(block.cost, started, request, reply))

    async def release(self, session_id: str) -> None:
        await self._channel.release(session_id)

    async def close(self) -> None:
        await self._channel.close()


class GrpcVerifier:
    """A Verifier at `address` (host:port). With a `pool` its channel is shared, otherwise it is its own."""

    def __init__(
        self,
        address: str,
        *,
        pool: ChannelPool | None = None,
        deadline_s: float = VERIFY_DEADLINE_S,
        prefill_s_per_1k_tokens: float = PREFILL_S_PER_1K_TOKENS,
    ) -> None:
        self._channel = RoleChannel(address, "Verifier", VerifierUnavailable, pool)
        self._deadline_s = deadline_s
        self._prefill_s_per_1k_tokens = prefill_s_per_1k_tokens
        self._info: VerifierInfo | None = None

    async def info(self) -> VerifierInfo:
        """Asked once, then remembered."""
        if self._info is None:
            self._info = codec.decode_verifier_info(await self._channel.call("Info", b"", INFO_DEADLINE_S))
        return self._info

    async def verify(self, call: VerifyCall) -> TargetRows:
        started = perf_counter()
        info = await self.info()
        request = codec.encode_verify_call(call)
        deadline_s = _deadline(call.prefix, self._deadline_s, self._prefill_s_per_1k_tokens)
        reply = await self._channel.call("Verify", request, deadline_s)
        target = codec.decode_target_rows(reply)
        check_target_rows(target, call, info)
        return dataclasses.replace(target, cost=_seen_from_here(target.cost, started, request, reply))

    async def resolve(self, call: ResolveCall) -> ResolvedToken:
        started = perf_counter()
        info = await self.info()
        request = codec.encode_resolve_call(call)
        reply = await self._channel.call("Resolve", request, self._deadline_s)
        resolved = codec.decode_resolved(reply)
        check_resolved(resolved, info)
        return dataclasses.replace(resolved, cost=_seen_from_here(resolved.cost, started, request, reply))

    async def release(self, session_id: str) -> None:
        await self._channel.release(session_id)

    async def close(self) -> None:
        await self._channel.close()


def _deadline(prefix: PrefixStatement, base_s: float, prefill_s_per_1k_tokens: float) -> float:
    return base_s + prefill_s_per_1k_tokens * len(prefix.new_token_ids) / 1000


def _seen_from_here(cost: CallCost, started: float, request: bytes, reply: bytes) -> CallCost:
    """The replica's cost with what only the caller knows."""
    return dataclasses.replace(
        cost, wall_s=perf_counter() - started, bytes_sent=len(request), bytes_received=len(reply)
    )
