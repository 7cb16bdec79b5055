"""Deadlines and connections."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import pytest

from specdiff_dist.errors import DrafterUnavailable, VerifierUnavailable
from specdiff_dist.transport.channel_pool import ChannelPool
from specdiff_dist.transport.grpc_client import GrpcDrafter, GrpcVerifier
from specdiff_dist.transport.grpc_server import start_drafter_server, start_verifier_server
from tests.transport.doubles import (
    Gated,
    draft_call,
    same_arrays,
    scripted_drafter,
    statement,
    table_verifier,
    verify_call,
)


async def test_a_silent_replica_costs_no_more_than_the_deadline():
    drafter_engine, verifier_engine = Gated(scripted_drafter()), Gated(table_verifier())
    drafter_server = await start_drafter_server(drafter_engine)
    verifier_server = await start_verifier_server(verifier_engine)
    drafter = GrpcDrafter(drafter_server.address, deadline_s=0.2, prefill_s_per_1k_tokens=0.0)
    verifier = GrpcVerifier(verifier_server.address, deadline_s=0.2, prefill_s_per_1k_tokens=0.0)
    started = time.perf_counter()
    with pytest.raises(DrafterUnavailable, match="DEADLINE_EXCEEDED"):
        await drafter.draft(draft_call())
    with pytest.raises(VerifierUnavailable, match="DEADLINE_EXCEEDED"):
        await verifier.verify(verify_call())
    assert 0.35 < time.perf_counter() - started < 1.5
    drafter_engine.gate.set()
    verifier_engine.gate.set()
    assert same_arrays(await verifier.verify(verify_call()), table_verifier().verify(verify_call()))
    for role, server in ((drafter, drafter_server), (verifier, verifier_server)):
        await role.close()
        await server.stop(0)


async def test_a_long_prompt_gets_longer():
    engine = Gated(table_verifier())
    server = await start_verifier_server(engine)
    verifier = GrpcVerifier(server.address, deadline_s=0.05, prefill_s_per_1k_tokens=1.0)
    call = asyncio.create_task(verifier.verify(verify_call(statement(tuple([1] * 1000)))))
    await asyncio.sleep(0.4)
    engine.gate.set()
    await call
    await verifier.close()
    await server.stop(0)


async def test_nobody_there_fails_fast():
    server = await start_verifier_server(table_verifier())
    await server.stop(0)
    verifier = GrpcVerifier(server.address)
    started = time.perf_counter()
    with pytest.raises(VerifierUnavailable):
        await verifier.info()
    with pytest.raises(VerifierUnavailable):
        await verifier.verify(verify_call())
    assert time.perf_counter() - started < 3.0, "the deadline is a minute"
    await verifier.close()
    await verifier.close()


async def test_a_replica_that_comes_back_is_found_again():
    server = await start_verifier_server(table_verifier())
    verifier = GrpcVerifier(server.address)
    await verifier.verify(verify_call())
    await server.stop(0)
    with pytest.raises(VerifierUnavailable):
        await verifier.verify(verify_call())
    again = await start_verifier_server(table_verifier(), port=server.port)
    async with asyncio.timeout(5):
        while True:
            try:
                await verifier.verify(verify_call())
                break
            except VerifierUnavailable:
                await asyncio.sleep(0.1)
    await verifier.close()
    await again.stop(0)


async def test_sessions_over_one_pool_do_not_grow_anything():
    server = await start_verifier_server(table_verifier())
    pool = ChannelPool()

    async def session() -> None:
        verifier = GrpcVerifier(server.address, pool=pool)
        await verifier.verify(verify_call())
        await verifier.release("session")
        await verifier.close()

    await session()
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(200):
        await session()
    assert len(pool) == 1
    assert len(os.listdir("/proc/self/fd")) <= files
    assert threading.active_count() <= threads
    await pool.close()
    await server.stop(0)
