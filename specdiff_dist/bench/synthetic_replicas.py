"""The synthetic pair behind two gRPC ports, in a process of its own.

Run as a module this is that process: what it is to be comes as JSON in its argument, its addresses go to stdout as JSON,
each further line of stdin sets the latencies, and the end of stdin ends it, also when its parent was killed.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import perf_counter

from specdiff_dist.bench.event_loop import run
from specdiff_dist.bench.pinning import pin
from specdiff_dist.bench.synthetic_pair import PairShape, SyntheticPair
from specdiff_dist.transport import codec
from specdiff_dist.transport.grpc_options import join_address
from specdiff_dist.transport.grpc_server import start_service

HOST = "127.0.0.1"
JITTER = 0.2  # a latency is between 1 - this and 1 + this times the stated one, so that sessions do not march in step


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds that calls take, on average; each reply says what its own took."""

    draft_s: float
    verify_s: float


class Replicas:
    """The process, as seen by its parent."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.drafter, self.verifier = json.loads(self._said())

    def set_latencies(self, latencies: Latencies) -> None:
        """For calls from now on."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(latencies)) + "\n")
        self._process.stdin.flush()
        self._said()

    def _said(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the synthetic replicas have stopped; what they said is above")
        return line


@contextmanager
def running_replicas(shape: PairShape, cores: Sequence[int] = ()) -> Iterator[Replicas]:
    """Starts the process, on `cores` if given, and ends it. Latencies are 0 until they are set."""
    about = json.dumps({"shape": asdict(shape), "cores": list(cores)})
    with subprocess.Popen(
        [sys.executable, "-m", __name__, about], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Replicas(process)
        finally:
            process.kill()


class _Clock:
    """Latencies of single calls, and the waiting."""

    def __init__(self) -> None:
        self.latencies = Latencies(0.0, 0.0)
        self._random = random.Random(0)

    def varied(self, stated_s: float) -> float:
        return stated_s * self._random.uniform(1.0 - JITTER, 1.0 + JITTER)

    async def until(self, due: float) -> None:
        await asyncio.sleep(max(due - perf_counter(), 0.0))


async def _serve(pair: SyntheticPair) -> None:
    clock = _Clock()

    async def drafter_info(request: bytes) -> bytes:
        return codec.encode_drafter_info(pair.drafter_info)

    async def verifier_info(request: bytes) -> bytes:
        return codec.encode_verifier_info(pair.verifier_info)

    async def draft(request: bytes) -> bytes:
        arrived, forward_s = perf_counter(), clock.varied(clock.latencies.draft_s)
        reply = codec.encode_draft_block(pair.draft(codec.decode_draft_call(request), forward_s))
        await clock.until(arrived + forward_s)
        return reply

    async def verify(request: bytes) -> bytes:
        arrived, forward_s = perf_counter(), clock.varied(clock.latencies.verify_s)
        reply = codec.encode_target_rows(pair.verify(codec.decode_verify_call(request), forward_s))
        await clock.until(arrived + forward_s)
        return reply

    async def release(request: bytes) -> bytes:
        return b""

    drafter, drafter_streams, drafter_port = await start_service(
        "Drafter", {"Info": drafter_info, "Draft": draft, "Release": release}, HOST, 0
    )
    verifier, verifier_streams, verifier_port = await start_service(
        "Verifier", {"Info": verifier_info, "Verify": verify, "Release": release}, HOST, 0
    )
    print(json.dumps([join_address(HOST, drafter_port), join_address(HOST, verifier_port)]), flush=True)
    lines: asyncio.Queue[str] = asyncio.Queue()
    _follow_stdin(lines)
    while line := await lines.get():
        clock.latencies = Latencies(**json.loads(line))
        print("{}", flush=True)
    for streams in (drafter_streams, verifier_streams):
        streams.close()
    await drafter.stop(None)
    await verifier.stop(None)


def _follow_stdin(lines: asyncio.Queue[str]) -> None:
    loop = asyncio.get_running_loop()

    def follow() -> None:
        while line := sys.stdin.readline():
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, "")

    threading.Thread(target=follow, daemon=True).start()


def _main() -> None:
    about = json.loads(sys.argv[1])
    pin(about["cores"])
    shape = PairShape(**{**about["shape"], "feature_layers": tuple(about["shape"]["feature_layers"])})
    run(_serve(SyntheticPair(shape)))


if __name__ == "__main__":
    _main()
