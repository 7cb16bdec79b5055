"""What the stream that carries everybody's calls must not do to any of them. The contract tests run over it, too."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from specdiff_dist.errors import DrafterUnavailable, InvalidRequest, PrefixMismatch
from specdiff_dist.pb import roles_pb2 as pb
from specdiff_dist.transport.call_stream import CallStream, StreamBroken
from specdiff_dist.transport.frames import MAX_TOGETHER_BYTES, Outbox
from specdiff_dist.transport.grpc_client import GrpcChannel
from specdiff_dist.transport.grpc_options import SERVER_OPTIONS
from specdiff_dist.transport.grpc_server import start_service
from specdiff_dist.transport.stream_server import StreamServer

SERVICE = "specdiff.v1.Drafter"
PATIENCE_S = 5.0


class Replica:
    """Answers `Draft` as the request says."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.num_infos = self.num_cancelled = self.num_started = 0

    async def draft(self, request: bytes) -> bytes:
        self.num_started += 1
        if request == b"wait":
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
        if request == b"mismatch":
            raise PrefixMismatch(7)
        if request == b"bug":
            raise RuntimeError("a bug")
        return b"<" + request[:100] + b">"

    async def info(self, request: bytes) -> bytes:
        self.num_infos += 1
        return b"info"

    async def start(self, port: int = 0) -> tuple[grpc.aio.Server, StreamServer, str]:
        handlers = {"Info": self.info, "Draft": self.draft, "Release": self.draft}
        server, streams, bound = await start_service("Drafter", handlers, "127.0.0.1", port)
        return server, streams, f"127.0.0.1:{bound}"


async def until(condition) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def reply_frame(stream: grpc.aio.StreamStreamCall) -> pb.ReplyFrame:
    message = await stream.read()
    assert isinstance(message, bytes)
    return pb.ReplyFrames.FromString(message).frames[0]


@pytest.fixture
async def replica():
    return Replica()


@pytest.fixture
async def served(replica):
    server, streams, address = await replica.start()
    yield address, server, streams
    await server.stop(0)


@pytest.fixture
async def channel(served):
    channel = GrpcChannel(served[0], "Drafter", DrafterUnavailable, None)
    yield channel
    await channel.close()


async def test_a_call_that_takes_long_holds_up_nobody(channel, replica):
    slow = asyncio.create_task(channel.call("Draft", b"wait", 5))
    for index in range(20):
        assert await channel.call("Draft", b"%d" % index, 1) == b"<%d>" % index
    assert not slow.done()
    replica.gate.set()
    assert await slow == b"<wait>"


async def test_errors_are_each_calls_own(channel):
    answers = await asyncio.gather(
        *(channel.call("Draft", each, 5) for each in (b"mismatch", b"bug", b"fine")), return_exceptions=True
    )
    assert isinstance(answers[0], PrefixMismatch) and answers[0].cached_len == 7
    assert "RuntimeError" in str(answers[1])
    assert answers[2] == b"<fine>"
    with pytest.raises(InvalidRequest, match="no method 'Nonsense'; there are Info, Draft, Release"):
        await channel._call_on(channel._stream, "Nonsense", b"", 1)


async def test_a_cancelled_caller_cancels_its_call_alone(channel, replica):
    gone, stays = (asyncio.create_task(channel.call("Draft", b"wait", 5)) for _ in range(2))
    await until(lambda: replica.num_started == 2)
    gone.cancel()
    await until(lambda: replica.num_cancelled == 1)
    replica.gate.set()
    assert await stays == b"<wait>"
    assert replica.num_cancelled == 1


async def test_a_deadline_ends_one_call_and_is_told_to_the_replica(channel, replica):
    stays = asyncio.create_task(channel.call("Draft", b"wait", 5))
    with pytest.raises(DrafterUnavailable, match="DEADLINE_EXCEEDED"):
        await channel.call("Draft", b"wait", 0.05)
    await until(lambda: replica.num_cancelled == 1)
    replica.gate.set()
    assert await stays == b"<wait>"


async def test_a_broken_stream_fails_what_is_under_way_and_the_next_call_opens_another(replica):
    server, _, address = await replica.start()
    channel = GrpcChannel(address, "Drafter", DrafterUnavailable, None)
    calls = [asyncio.create_task(channel.call("Draft", b"wait", 60)) for _ in range(3)]
    await until(lambda: replica.num_started == 3)
    await server.stop(0)
    for answer in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(answer, DrafterUnavailable)
    again, _, _ = await replica.start(int(address.rpartition(":")[2]))
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                assert await channel.call("Draft", b"back", 1) == b"<back>"
                break
            except DrafterUnavailable:
                await asyncio.sleep(0.05)
    await channel.close()
    await again.stop(0)


async def test_info_is_asked_once_for_a_connection(replica):
    server, _, address = await replica.start()
    channel = GrpcChannel(address, "Drafter", DrafterUnavailable, None)
    for _ in range(3):
        assert await channel.call("Info", b"", 1) == b"info"
    assert replica.num_infos == 1
    await server.stop(0)
    again, _, _ = await replica.start(int(address.rpartition(":")[2]))
    async with asyncio.timeout(PATIENCE_S):
        while replica.num_infos == 1:  # another replica may be there now
            try:
                await channel.call("Info", b"", 1)
            except DrafterUnavailable:
                await asyncio.sleep(0.05)
    await channel.close()
    await again.stop(0)


async def test_a_closing_replica_answers_what_runs_and_refuses_the_rest(channel, served, replica):
    running = asyncio.create_task(channel.call("Draft", b"wait", 5))
    await until(lambda: replica.num_started == 1)
    served[2].close()
    await asyncio.sleep(0.05)
    with pytest.raises(DrafterUnavailable, match="stopping"):
        await channel.call("Draft", b"late", 1)
    replica.gate.set()
    assert await running == b"<wait>"


async def test_a_large_request_goes_by_itself(channel, replica, monkeypatch):
    def refuse(*_):
        raise AssertionError("it went over the stream")

    monkeypatch.setattr(channel, "_call_on", refuse)
    assert await channel.call("Draft", b"x" * (MAX_TOGETHER_BYTES + 1), 5) == b"<" + b"x" * 100 + b">"


async def test_a_replica_without_streams_is_called_as_before():
    async def draft(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return b"old " + request

    server = grpc.aio.server(options=SERVER_OPTIONS)
    method = grpc.unary_unary_rpc_method_handler(draft)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {"Draft": method})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = GrpcChannel(f"127.0.0.1:{port}", "Drafter", DrafterUnavailable, None)
    for _ in range(2):
        assert await channel.call("Draft", b"call", 5) == b"old call"
    await channel.close()
    await server.stop(0)


async def test_frames_that_cannot_be_read_end_their_own_stream_alone(channel, served):
    hostile = grpc.aio.insecure_channel(served[0])
    stream = hostile.stream_stream(f"/{SERVICE}/Calls")()
    await stream.write(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stream.read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await channel.call("Draft", b"fine", 1) == b"<fine>"
    await hostile.close()


async def test_a_call_id_in_use_and_an_unknown_one_harm_nobody(served, replica):
    other = grpc.aio.insecure_channel(served[0])
    stream = other.stream_stream(f"/{SERVICE}/Calls")()
    frames = [
        pb.CallFrame(call_id=9, is_cancelled=True),
        pb.CallFrame(call_id=1, method="Draft", request=b"wait"),
        pb.CallFrame(call_id=1, method="Draft", request=b"twice"),
    ]
    await stream.write(pb.CallFrames(frames=frames).SerializeToString())
    first = await reply_frame(stream)
    assert first.call_id == 1 and "already runs" in first.error.message
    replica.gate.set()
    second = await reply_frame(stream)
    assert second.reply == b"<wait>"
    await other.close()


async def test_closing_ends_calls_under_way(served, replica):
    channel = GrpcChannel(served[0], "Drafter", DrafterUnavailable, None)
    call = asyncio.create_task(channel.call("Draft", b"wait", 60))
    await until(lambda: replica.num_started == 1)
    await channel.close()
    with pytest.raises(DrafterUnavailable, match="closed during the call"):
        await call
    await until(lambda: replica.num_cancelled == 1)
    with pytest.raises(DrafterUnavailable, match="closed"):
        await channel.call("Draft", b"late", 1)


async def test_nobody_there_is_told_at_once():
    channel = grpc.aio.insecure_channel("127.0.0.1:1")
    stream = CallStream(channel, SERVICE)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(StreamBroken):
            await stream.call("Draft", b"")
    await stream.close()
    await channel.close()


async def test_what_waits_for_a_write_leaves_together_up_to_a_limit():
    written: list[int] = []
    outbox: Outbox[pb.CallFrame] = Outbox(lambda frames: bytes(len(frames)))

    async def write(message: bytes) -> None:
        written.append(len(message))
        if len(written) == 1:
            for _ in range(5):
                outbox.add(pb.CallFrame(request=b"x"))
            for _ in range(2):
                outbox.add(pb.CallFrame(request=b"x" * MAX_TOGETHER_BYTES))
            outbox.end()

    outbox.add(pb.CallFrame(request=b"first"))
    await outbox.write_all(write)
    assert written == [1, 5, 1, 1]
