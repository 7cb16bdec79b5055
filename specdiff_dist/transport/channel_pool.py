"""One channel per address, so that file descriptors and threads do not grow with requests."""

from __future__ import annotations

from collections import OrderedDict

import grpc

from specdiff_dist.transport.call_stream import CallStream
from specdiff_dist.transport.grpc_options import KEEPALIVE_S, channel_options

DEFAULT_MAX_IDLE = 32


class ChannelPool:
    """Lends channels; belongs to one event loop.

    A channel nobody holds stays open for the next session; of those, the longest unused are closed beyond `max_idle`,
    so addresses of replicas that are gone do not pile up.
    """

    def __init__(self, *, max_idle: int = DEFAULT_MAX_IDLE, keepalive_s: float = KEEPALIVE_S) -> None:
        self._max_idle = max_idle
        self._keepalive_s = keepalive_s
        self._held: dict[str, tuple[grpc.aio.Channel, int]] = {}  # with the number of holders
        self._idle: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._streams: dict[str, dict[str, CallStream]] = {}  # of open channels, by address and service

    def __len__(self) -> int:
        """Open channels."""
        return len(self._held) + len(self._idle)

    def hold(self, address: str) -> grpc.aio.Channel:
        """The channel to `address`, opened if need be; give it back with `drop`."""
        channel, num_holders = self._held.get(address, (None, 0))
        if channel is None:
            channel = self._idle.pop(address, None) or self._open(address)
        self._held[address] = (channel, num_holders + 1)
        return channel

    def stream(self, address: str, service: str) -> CallStream:
        """The stream of everybody's calls to a service (its full name) at an address that is held."""
        streams = self._streams.setdefault(address, {})
        if service not in streams:
            streams[service] = CallStream(self._held[address][0], service)
        return streams[service]

    async def drop(self, address: str) -> None:
        """Ends one hold. After `close` there is nothing to end."""
        channel, num_holders = self._held.pop(address, (None, 0))
        if channel is None:
            return
        if num_holders > 1:
            self._held[address] = (channel, num_holders - 1)
            return
        self._idle[address] = channel
        while len(self._idle) > self._max_idle:
            address, oldest = self._idle.popitem(last=False)
            await self._close(address, oldest)

    async def close(self) -> None:
        """Closes every channel; calls in flight fail."""
        channels = {address: channel for address, (channel, _) in self._held.items()} | dict(self._idle)
        self._held.clear()
        self._idle.clear()
        for address, channel in channels.items():
            await self._close(address, channel)

    async def _close(self, address: str, channel: grpc.aio.Channel) -> None:
        for stream in self._streams.pop(address, {}).values():
            await stream.close()
        await channel.close()

    def _open(self, address: str) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options=channel_options(self._keepalive_s))
