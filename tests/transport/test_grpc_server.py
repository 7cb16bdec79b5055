"""What only a port can do wrong: sizes, pings, garbage, shutdown."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from specdiff_dist.errors import InvalidRequest, VerifierUnavailable
from specdiff_dist.pb import roles_pb2 as pb
from specdiff_dist.transport import codec, grpc_server, role_service
from specdiff_dist.transport.channel_pool import ChannelPool
from specdiff_dist.transport.grpc_client import GrpcDrafter, GrpcVerifier
from specdiff_dist.transport.grpc_errors import DETAIL_KEY, from_status
from specdiff_dist.transport.grpc_server import RoleServer, start_drafter_server, start_verifier_server
from tests.transport.doubles import (
    WAIT_S,
    Gated,
    draft_call,
    same_arrays,
    scripted_drafter,
    statement,
    table_verifier,
    verify_call,
)

ROOT = Path(__file__).resolve().parents[2]
METHODS = ["/specdiff.v1.Verifier/Verify", "/specdiff.v1.Verifier/Release"]


@pytest.fixture
async def server() -> AsyncIterator[RoleServer]:
    running = await start_verifier_server(table_verifier())
    yield running
    await running.stop(0)


async def still_serves(server: RoleServer) -> bool:
    verifier = GrpcVerifier(server.address)
    reply = await verifier.verify(verify_call())
    await verifier.release("session")
    await verifier.close()
    return same_arrays(reply, table_verifier().verify(verify_call()))


# Sizes


async def test_a_call_over_the_limit_is_the_callers_mistake(server):
    verifier = GrpcVerifier(server.address)
    too_long = statement(tuple([1] * (17 << 20)))  # 68 MiB of token ids
    with pytest.raises(InvalidRequest, match="the limit is 67108864"):
        await verifier.verify(verify_call(too_long, draft=()))
    await verifier.close()
    assert await still_serves(server)


async def test_a_foreign_client_over_the_limit_gets_a_clear_status(server):
    async with grpc.aio.insecure_channel(server.address, options=[("grpc.max_send_message_length", -1)]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary(METHODS[0])(b"\0" * (65 << 20), timeout=WAIT_S)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert isinstance(from_status(refused.value, VerifierUnavailable), InvalidRequest)
    assert await still_serves(server)


async def test_a_reply_over_the_limit_is_refused_with_a_reason(server, monkeypatch):
    monkeypatch.setattr(role_service, "MAX_MESSAGE_BYTES", 200)
    verifier = GrpcVerifier(server.address)
    with pytest.raises(InvalidRequest, match="the reply takes"):
        await verifier.verify(verify_call())
    await verifier.close()


# Pings


async def verify_while_silent(server: RoleServer, engine: Gated, *, silent_s: float, keepalive_s: float) -> None:
    """One call to a verifier that says nothing for a while, over a connection that pings."""
    pool = ChannelPool(keepalive_s=keepalive_s)
    call = asyncio.create_task(GrpcVerifier(server.address, pool=pool).verify(verify_call()))
    await asyncio.sleep(silent_s)
    engine.gate.set()
    try:
        await call
    finally:
        await pool.close()
        await server.stop(0)


async def test_pings_during_a_long_silence_are_welcome(monkeypatch):
    """Five pings, as many as a client with the default interval sends in a minute of prefill. The same pings end the
    call where the server has gRPC's default options, so they are really sent (gRPC's least interval is one second)."""
    ours, theirs = Gated(table_verifier()), Gated(table_verifier())
    with monkeypatch.context() as patch:
        patch.setattr(grpc_server, "SERVER_OPTIONS", [])
        default_server = await start_verifier_server(theirs)
    server = await start_verifier_server(ours)
    with_ours, with_default = await asyncio.gather(
        verify_while_silent(server, ours, silent_s=5.6, keepalive_s=1.0),
        verify_while_silent(default_server, theirs, silent_s=5.6, keepalive_s=1.0),
        return_exceptions=True,
    )
    assert with_ours is None
    assert isinstance(with_default, VerifierUnavailable)
    assert "Too many pings" in str(with_default)


# Garbage


@pytest.mark.parametrize(
    "garbage",
    [
        os.urandom(4096),
        pickle.dumps({"session_id": "x"}),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(4096),
    ],
    ids=["random", "pickle", "HTTP/1", "HTTP/2 preface, then random"],
)
async def test_random_bytes_on_the_port_harm_nobody(server, garbage):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(garbage)
    writer.write_eof()
    async with asyncio.timeout(WAIT_S):
        try:
            while await reader.read(1 << 16):
                pass
        except ConnectionError:  # a reset is as good as a goodbye
            writer.transport.abort()
    writer.close()
    assert await still_serves(server)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "message",
    [os.urandom(512), pickle.dumps({"session_id": "x"}), b"\x0a\x05\x0a\x03\xff\xff\xff"],
    ids=["random", "pickle", "broken UTF-8"],
)
async def test_messages_that_are_not_ours_are_invalid(server, method, message):
    async with grpc.aio.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary(method)(message, timeout=WAIT_S)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert DETAIL_KEY in dict(refused.value.trailing_metadata() or ())
    assert await still_serves(server)


async def test_every_message_one_byte_wrong_gets_an_answer(server):
    """Flips each byte of a real call: an answer or a refusal, never a crash (INTERNAL, UNKNOWN)."""
    message = codec.encode_verify_call(verify_call(draft=(7,)))
    codes = set()
    async with grpc.aio.insecure_channel(server.address) as channel:
        verify = channel.unary_unary(METHODS[0])
        for position in range(len(message)):
            wrong = bytearray(message)
            wrong[position] ^= 0xFF
            try:
                await verify(bytes(wrong), timeout=WAIT_S)
            except grpc.aio.AioRpcError as error:
                codes.add(error.code())
    assert codes <= {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.ABORTED,
    }
    assert grpc.StatusCode.INVALID_ARGUMENT in codes


async def test_the_status_says_which_error(server):
    async with grpc.aio.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary(METHODS[0])(codec.encode_verify_call(verify_call(statement(cached=3))))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    serialised = dict(refused.value.trailing_metadata() or ())[DETAIL_KEY]
    assert isinstance(serialised, bytes)
    detail = pb.ErrorDetail.FromString(serialised)
    assert (detail.kind, detail.cached_len) == (pb.ErrorDetail.KIND_PREFIX_MISMATCH, 0)
    assert "resend" in (refused.value.details() or "")


# Ports, shutdown, death


async def test_a_taken_port_is_an_error(server):
    with pytest.raises(OSError, match="is the port taken"):
        await start_verifier_server(table_verifier(), port=server.port)


async def test_stop_lets_a_running_call_end():
    engine = Gated(table_verifier())
    server = await start_verifier_server(engine)
    verifier = GrpcVerifier(server.address)
    call = asyncio.create_task(verifier.verify(verify_call()))
    assert await asyncio.to_thread(engine.entered.wait, WAIT_S)
    stop = asyncio.create_task(server.stop(WAIT_S))
    await asyncio.sleep(0.05)
    with pytest.raises(VerifierUnavailable):
        await verifier.verify(verify_call(statement(session_id="late")))
    engine.gate.set()
    assert same_arrays(await call, table_verifier().verify(verify_call()))
    await stop
    await server.stop(0)
    await verifier.close()


async def test_stop_without_grace_cuts_a_running_call_off():
    engine = Gated(table_verifier())
    server = await start_verifier_server(engine)
    verifier = GrpcVerifier(server.address)
    call = asyncio.create_task(verifier.verify(verify_call()))
    assert await asyncio.to_thread(engine.entered.wait, WAIT_S)
    async with asyncio.timeout(WAIT_S):
        await server.stop(0)
        with pytest.raises(VerifierUnavailable):
            await call
    engine.gate.set()
    await verifier.close()


SERVER_SCRIPT = """
import asyncio, time
from specdiff_dist.transport.grpc_server import start_verifier_server
from tests.transport.doubles import Answering, table_verifier

def slow(reply):
    print("entered", flush=True)
    time.sleep(60)

async def main():
    server = await start_verifier_server(Answering(table_verifier(), slow))
    print(server.address, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_killed_server_is_noticed_at_once():
    process = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, "-c", SERVER_SCRIPT], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        verifier = GrpcVerifier((await asyncio.to_thread(process.stdout.readline)).strip(), deadline_s=WAIT_S)
        call = asyncio.create_task(verifier.verify(verify_call()))
        await asyncio.to_thread(process.stdout.readline)
        killed = time.perf_counter()
        process.send_signal(signal.SIGKILL)
        with pytest.raises(VerifierUnavailable, match="UNAVAILABLE"):
            await call
        assert time.perf_counter() - killed < 2.0
        with pytest.raises(VerifierUnavailable):
            await verifier.verify(verify_call())
        await verifier.release("session")  # never raises
        await verifier.close()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_server_and_client_in_loops_of_their_own():
    """As in a replica, whose loop is not the main thread's."""
    started, ended = threading.Event(), threading.Event()
    addresses: list[str] = []

    async def serve() -> None:
        server = await start_drafter_server(scripted_drafter())
        addresses.append(server.address)
        started.set()
        await asyncio.to_thread(ended.wait, WAIT_S)
        await server.stop(0)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert await asyncio.to_thread(started.wait, WAIT_S)
    drafter = GrpcDrafter(addresses[0])
    for seed in range(20):
        np.testing.assert_array_equal(
            (await drafter.draft(draft_call(seed=seed))).token_ids,
            scripted_drafter().draft(draft_call(seed=seed)).token_ids,
        )
    await drafter.close()
    ended.set()
    await asyncio.to_thread(thread.join, WAIT_S)
    assert not thread.is_alive()
