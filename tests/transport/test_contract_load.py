"""The contract of the two roles, held against every transport: full queues, cancellation, closing."""

from __future__ import annotations

import asyncio

import pytest

from specdiff_dist.errors import (
    DrafterUnavailable,
    VerifierUnavailable,
)
from tests.transport.doubles import (
    Gated,
    draft_call,
    entered,
    queued,
    same_arrays,
    scripted_drafter,
    statement,
    table_verifier,
    verify_call,
)


async def test_a_full_queue_refuses_and_recovers(transport):
    engine = Gated(table_verifier())
    verifier = await transport.verifier(engine, max_queued=2)
    running = asyncio.create_task(verifier.verify(verify_call()))
    await entered(engine)
    waiting = asyncio.create_task(verifier.verify(verify_call()))
    await queued(transport, 2)
    with pytest.raises(VerifierUnavailable, match="2 calls already wait"):
        await verifier.verify(verify_call())
    release = asyncio.create_task(verifier.release("another session"))  # always has room
    engine.gate.set()
    await asyncio.gather(running, waiting, release)
    await verifier.verify(verify_call())


async def test_a_cancelled_call_leaves_the_session_consistent(transport):
    engine = Gated(table_verifier())
    verifier = await transport.verifier(engine)
    call = asyncio.create_task(verifier.verify(verify_call()))
    await entered(engine)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    engine.gate.set()
    assert same_arrays(await verifier.verify(verify_call()), table_verifier().verify(verify_call()))
    await verifier.release("session")
    assert engine.num_sessions == 0


async def test_a_call_cancelled_while_it_waits_never_starts(transport):
    table = table_verifier()
    engine = Gated(table)
    verifier = await transport.verifier(engine)
    running = asyncio.create_task(verifier.verify(verify_call()))
    await entered(engine)
    waiting = asyncio.create_task(verifier.verify(verify_call(statement(session_id="other"))))
    await queued(transport, 2)
    waiting.cancel()
    await asyncio.wait([waiting])
    await queued(transport, 1)
    engine.gate.set()
    await running
    await verifier.release("session")  # comes after anything that waited
    assert [call.prefix.session_id for call in table.calls] == ["session"]
    assert engine.num_sessions == 0


async def test_cancelling_at_any_moment_harms_nothing(transport):
    verifier = await transport.verifier(table_verifier(), max_queued=1)
    expected = table_verifier().verify(verify_call())
    for attempt in range(60):
        call = asyncio.create_task(verifier.verify(verify_call()))
        await asyncio.sleep(attempt % 6 * 0.0005)
        call.cancel()
        await asyncio.wait([call])
    await queued(transport, 0)  # with one place in the queue, one that is never given back would keep all others out
    assert same_arrays(await verifier.verify(verify_call()), expected)


async def test_a_release_survives_the_cancellation_of_its_caller(transport):
    engine = Gated(table_verifier())
    verifier = await transport.verifier(engine)
    running = asyncio.create_task(verifier.verify(verify_call()))
    await entered(engine)
    release = asyncio.create_task(verifier.release("session"))
    await queued(transport, 2)
    release.cancel()
    await asyncio.wait([release])
    await asyncio.sleep(0.05)  # time for a cancellation to travel, which must not take the release with it
    assert await transport.num_queued() == 2
    engine.gate.set()
    await running
    await verifier.release("another session")
    assert engine.num_sessions == 0


async def test_a_closed_role_is_unavailable(transport):
    drafter, verifier = await transport.drafter(scripted_drafter()), await transport.verifier(table_verifier())
    await drafter.info()
    await drafter.close()
    await transport.close()
    with pytest.raises(DrafterUnavailable):
        await drafter.draft(draft_call())
    with pytest.raises(VerifierUnavailable):
        await verifier.verify(verify_call())
    await verifier.release("session")
