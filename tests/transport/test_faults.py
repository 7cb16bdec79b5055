"""What a bad network does to a call: an error in time, and a session that goes on where it was."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from specdiff_dist.config import DecodeConfig, Static
from specdiff_dist.engine import decode
from specdiff_dist.errors import VerifierUnavailable
from specdiff_dist.transport.grpc_client import GrpcDrafter, GrpcVerifier
from specdiff_dist.transport.grpc_server import start_drafter_server, start_verifier_server
from specdiff_dist.transport.local import LocalVerifier
from tests.doubles import make_request, plain_greedy
from tests.transport.doubles import (
    PROMPT,
    TABLE,
    WAIT_S,
    Gated,
    same_arrays,
    scripted_drafter,
    statement,
    table_verifier,
    verify_call,
)
from tests.transport.fault_proxy import FaultProxy

# A connection may be accepted in the very moment in which the proxy goes: it is then closed by the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

FIRST = verify_call(draft=(7, 8))
NEXT = verify_call(statement((*PROMPT, 7, 30), cached=len(PROMPT) + 1, round_index=1), draft=(11, 12))


@asynccontextmanager
async def proxied(engine: object, *, deadline_s: float = WAIT_S) -> AsyncIterator[tuple[FaultProxy, GrpcVerifier]]:
    server = await start_verifier_server(engine)  # type: ignore[arg-type]
    async with FaultProxy(server.port) as proxy:
        verifier = GrpcVerifier(proxy.address, deadline_s=deadline_s, prefill_s_per_1k_tokens=0.0)
        yield proxy, verifier
        await verifier.close()
    await server.stop(0)
    gc.collect()  # here, and not in a test that has nothing to do with it


async def retried(verifier: GrpcVerifier) -> object:
    """The next round, tried again until the connection is back: the same call, so the same reply."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await verifier.verify(NEXT)
            except VerifierUnavailable:
                await asyncio.sleep(0.05)


def expected() -> object:
    engine = table_verifier()
    engine.verify(FIRST)
    return engine.verify(NEXT)


async def test_decode_goes_on_without_a_drafter_that_is_cut_off():
    server = await start_drafter_server(scripted_drafter())
    async with FaultProxy(server.port) as proxy:
        drafter, verifier = GrpcDrafter(proxy.address), LocalVerifier(table_verifier())
        request = make_request(PROMPT, max_tokens=60)
        chunks = []
        async for chunk in decode(request, DecodeConfig(policy=Static(3)), drafter, verifier, tier="exact"):
            chunks.append(chunk)
            if len(chunks) == 3:
                await server.stop(0)
                proxy.cut()
        await drafter.close()
        await verifier.close()
    assert [token for chunk in chunks for token in chunk.token_ids] == plain_greedy(TABLE, PROMPT, 60)
    assert [chunk.rounds[0].degraded for chunk in chunks[:4]] == [False, False, False, True]
    receipt = chunks[-1].receipt
    assert receipt is not None
    assert receipt.degraded


async def test_a_slow_network_is_only_slow():
    async with proxied(table_verifier()) as (proxy, verifier):
        await verifier.info()
        proxy.delay_s = 0.1
        assert (await verifier.verify(FIRST)).cost.wall_s >= 0.2


async def test_a_network_slower_than_the_deadline():
    async with proxied(table_verifier(), deadline_s=0.3) as (proxy, verifier):
        await verifier.verify(FIRST)
        proxy.delay_s = 0.5
        started = time.perf_counter()
        with pytest.raises(VerifierUnavailable, match="DEADLINE_EXCEEDED"):
            await verifier.verify(NEXT)
        assert 0.25 < time.perf_counter() - started < 1.0
        proxy.delay_s = 0.0
        assert same_arrays(await retried(verifier), expected())


async def test_a_connection_that_never_opens_is_given_up_before_the_deadline():
    async with proxied(table_verifier(), deadline_s=60.0) as (proxy, verifier):
        proxy.is_deaf = True
        started = time.perf_counter()
        with pytest.raises(VerifierUnavailable):
            await verifier.info()
        assert time.perf_counter() - started < 4.0


async def test_a_network_that_swallows_everything():
    async with proxied(table_verifier(), deadline_s=0.3) as (proxy, verifier):
        await verifier.verify(FIRST)
        proxy.is_deaf = True
        with pytest.raises(VerifierUnavailable):
            await verifier.verify(NEXT)


@pytest.mark.parametrize("num_bytes", [1, 10, 60, 300])
async def test_a_reply_cut_off_in_the_middle(num_bytes):
    async with proxied(table_verifier()) as (proxy, verifier):
        await verifier.verify(FIRST)
        proxy.reply_bytes_left = num_bytes
        with pytest.raises(VerifierUnavailable):
            await verifier.verify(NEXT)
        proxy.reply_bytes_left = None
        assert same_arrays(await retried(verifier), expected())
        assert proxy.num_connections > 1


async def test_a_connection_reset_during_the_call():
    table = table_verifier()
    engine = Gated(table)
    engine.gate.set()
    async with proxied(engine) as (proxy, verifier):
        await verifier.verify(FIRST)
        engine.gate.clear()
        engine.entered.clear()
        call = asyncio.create_task(verifier.verify(NEXT))
        assert await asyncio.to_thread(engine.entered.wait, WAIT_S)
        started = time.perf_counter()
        proxy.cut()
        with pytest.raises(VerifierUnavailable, match="UNAVAILABLE"):
            await call
        assert time.perf_counter() - started < 2.0, "long before the deadline"
        engine.gate.set()
        assert same_arrays(await retried(verifier), expected())
    assert len(table.calls) >= 3
