from __future__ import annotations

import grpc

from specdiff_dist.transport.channel_pool import ChannelPool


def is_closed(channel: grpc.aio.Channel) -> bool:
    try:
        return channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
    except grpc.aio.UsageError:
        return True


async def test_holders_of_one_address_share_its_channel():
    pool = ChannelPool()
    channel = pool.hold("127.0.0.1:1")
    assert pool.hold("127.0.0.1:1") is channel
    assert pool.hold("127.0.0.1:2") is not channel
    assert len(pool) == 2
    await pool.close()


async def test_a_channel_outlives_its_holders_until_others_are_more_recent():
    pool = ChannelPool(max_idle=2)
    channels = {port: pool.hold(f"127.0.0.1:{port}") for port in (1, 2, 3)}
    held_twice = pool.hold("127.0.0.1:3")
    for port in (1, 2, 3):
        await pool.drop(f"127.0.0.1:{port}")
    assert not any(is_closed(channel) for channel in channels.values()), "two idle, one still held"
    await pool.drop("127.0.0.1:3")
    assert [is_closed(channels[port]) for port in (1, 2, 3)] == [True, False, False]
    assert pool.hold("127.0.0.1:3") is held_twice
    assert pool.hold("127.0.0.1:1") is not channels[1]
    await pool.close()


async def test_close_closes_held_and_idle_channels():
    pool = ChannelPool()
    held, idle = pool.hold("127.0.0.1:1"), pool.hold("127.0.0.1:2")
    await pool.drop("127.0.0.1:2")
    await pool.close()
    assert is_closed(held)
    assert is_closed(idle)
    await pool.drop("127.0.0.1:1")  # a late holder harms nothing
    assert len(pool) == 0
