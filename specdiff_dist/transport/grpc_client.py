"""Roles over gRPC."""

from __future__ import annotations

import asyncio

import grpc

from specdiff_dist.errors import DrafterUnavailable, VerifierUnavailable
from specdiff_dist.pb import roles_pb2 as pb
from specdiff_dist.transport.call_stream import CallStream, StreamBroken
from specdiff_dist.transport.channel_pool import ChannelPool
from specdiff_dist.transport.error_detail import Unavailable, error_of
from specdiff_dist.transport.frames import MAX_TOGETHER_BYTES
from specdiff_dist.transport.grpc_errors import from_status
from specdiff_dist.transport.remote_roles import (
    DRAFT_DEADLINE_S,
    PREFILL_S_PER_1K_TOKENS,
    VERIFY_DEADLINE_S,
    RemoteDrafter,
    RemoteVerifier,
)


class GrpcChannel:
    """Calls one service at one address. Holds its gRPC channel until `close`."""

    def __init__(self, address: str, service: str, unavailable: Unavailable, pool: ChannelPool | None) -> None:
        self._address = address
        self._unavailable: Unavailable = unavailable
        self._owns_pool = pool is None
        self._pool = ChannelPool(max_idle=0) if pool is None else pool
        channel = self._pool.hold(address)
        self._is_open = True
        descriptor = pb.DESCRIPTOR.services_by_name[service]
        self._stream: CallStream | None = self._pool.stream(address, descriptor.full_name)
        self._methods: dict[str, grpc.aio.UnaryUnaryMultiCallable] = {
            method.name: channel.unary_unary(f"/{descriptor.full_name}/{method.name}")
            for method in descriptor.methods
            if not method.client_streaming
        }  # without (de)serialisers: bytes in, bytes out, so that their sizes are known

    async def call(self, method: str, request: bytes, deadline_s: float) -> bytes:
        """See Channel.call. Over the stream that all sessions share; a large request goes by itself, so that nobody else's
        waits behind it."""
        if not self._is_open:
            raise self._unavailable("the channel is closed")
        if self._stream is not None and len(request) <= MAX_TOGETHER_BYTES:
            try:
                return await self._call_on(self._stream, method, request, deadline_s)
            except StreamBroken as error:
                if error.status is not grpc.StatusCode.UNIMPLEMENTED:
                    raise self._unavailable(f"no answer: {error}") from error
                self._stream = None  # an older replica
        return await self._call_alone(method, request, deadline_s)

    async def _call_on(self, stream: CallStream, method: str, request: bytes, deadline_s: float) -> bytes:
        try:
            async with asyncio.timeout(deadline_s):
                frame = await stream.call(method, request)
        except TimeoutError as error:
            raise self._unavailable(f"no answer: DEADLINE_EXCEEDED: none within {deadline_s:g} s") from error
        if frame.HasField("error"):
            raise error_of(frame.error, self._unavailable)
        return frame.reply

    async def _call_alone(self, method: str, request: bytes, deadline_s: float) -> bytes:
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

    async def close(self) -> None:
        """Gives the channel back; safe to call again."""
        if self._is_open:
            self._is_open = False
            await (self._pool.close() if self._owns_pool else self._pool.drop(self._address))


class GrpcDrafter(RemoteDrafter):
    """A Drafter at `address` (host:port). With a `pool` its channel is shared, otherwise it is its own."""

    def __init__(
        self,
        address: str,
        *,
        pool: ChannelPool | None = None,
        deadline_s: float = DRAFT_DEADLINE_S,
        prefill_s_per_1k_tokens: float = PREFILL_S_PER_1K_TOKENS,
    ) -> None:
        channel = GrpcChannel(address, "Drafter", DrafterUnavailable, pool)
        super().__init__(channel, deadline_s=deadline_s, prefill_s_per_1k_tokens=prefill_s_per_1k_tokens)


class GrpcVerifier(RemoteVerifier):
    """A Verifier at `address` (host:port). With a `pool` its channel is shared, otherwise it is its own."""

    def __init__(
        self,
        address: str,
        *,
        pool: ChannelPool | None = None,
        deadline_s: float = VERIFY_DEADLINE_S,
        prefill_s_per_1k_tokens: float = PREFILL_S_PER_1K_TOKENS,
    ) -> None:
        channel = GrpcChannel(address, "Verifier", VerifierUnavailable, pool)
        super().__init__(channel, deadline_s=deadline_s, prefill_s_per_1k_tokens=prefill_s_per_1k_tokens)
