"""The loop that joins the forwards of many calls, with an engine whose model is a list."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from specdiff_dist.batching import Steps, run_alone
from specdiff_dist.errors import InvalidRows
from specdiff_dist.transport.engine_loop import PREFILL_BUDGET, SHORT_PART
from specdiff_dist.transport.engine_thread import EngineThread, EngineUnavailable
from specdiff_dist.types import DraftBlock


@dataclass(frozen=True)
class Piece:
    session: str
    num_tokens: int


@dataclass(frozen=True)
class Ask:
    session: str
    sizes: tuple[int, ...]
    fails: bool = False


class Engine:
    """Every call wants a forward of each of its sizes. The first forward waits until the gate opens."""

    def __init__(self) -> None:
        self.forwards: list[list[Piece]] = []
        self.gate, self.entered = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self.pause_s = 0.0
        self.under_way: dict[str, int] = {}
        self.closed: list[str] = []

    def forward_parts(self, parts: Sequence[Piece]) -> list[int]:
        self.entered.set()
        assert self.gate.wait(10)
        time.sleep(self.pause_s)
        self.forwards.append(list(parts))
        if self.error is not None:
            raise self.error
        return [piece.num_tokens for piece in parts]

    def steps(self, ask: Ask) -> Steps[Piece, int, DraftBlock]:
        assert not self.under_way.get(ask.session), "two calls of one session at once"
        self.under_way[ask.session] = 1
        total = 0
        try:
            for size in ask.sizes:
                total += yield Piece(ask.session, size)
            if ask.fails:
                raise InvalidRows("a bad row")
        except GeneratorExit:
            self.closed.append(ask.session)
            raise
        finally:
            self.under_way[ask.session] = 0
        return DraftBlock.empty(cached_len=total)


def start(engine: Engine) -> tuple[EngineThread, asyncio.Task[DraftBlock]]:
    """A thread that is busy with a first call, so that what comes next arrives together."""
    thread = EngineThread("test", forward_parts=engine.forward_parts)
    return thread, asyncio.create_task(ask(thread, engine, Ask("first", (1,))))


async def ask(thread: EngineThread, engine: Engine, what: Ask) -> DraftBlock:
    return await thread.call_in_steps(engine.steps, what, session_id=what.session)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (it becomes true in another thread)
        await asyncio.sleep(0.0005)


async def all_queued(thread: EngineThread, count: int) -> None:
    await until(lambda: thread.num_queued >= count)


async def until_entered(engine: Engine) -> None:
    await until(engine.entered.is_set)


async def test_calls_that_wait_together_share_their_forwards():
    engine = Engine()
    thread, first = start(engine)
    await until_entered(engine)
    asks = [Ask(f"s{i}", tuple(range(1, 2 + i))) for i in range(5)]  # 1 … 5 forwards
    tasks = [asyncio.create_task(ask(thread, engine, one)) for one in asks]
    await all_queued(thread, 6)
    engine.gate.set()
    blocks = await asyncio.gather(*tasks)
    await first
    assert [block.cached_len for block in blocks] == [1, 3, 6, 10, 15]
    assert [len(parts) for parts in engine.forwards] == [1, 5, 4, 3, 2, 1]
    assert [block.cost.num_forwards for block in blocks] == [1, 2, 3, 4, 5]
    assert {block.cost.batch_size for block in blocks} == {5}
    assert all(block.cost.forward_s > 0 and block.cost.queue_s > 0 for block in blocks)
    assert thread.num_queued == 0


async def test_a_long_prompt_goes_in_pieces_beside_the_others():
    engine = Engine()
    thread, first = start(engine)
    await until_entered(engine)
    long = [Ask(f"long{i}", (PREFILL_BUDGET // 2,) * 4) for i in range(3)]
    short = [Ask(f"short{i}", (1, SHORT_PART)) for i in range(4)]
    tasks = [asyncio.create_task(ask(thread, engine, one)) for one in (*long, *short)]
    await all_queued(thread, 8)
    engine.gate.set()
    await asyncio.gather(first, *tasks)
    for parts in engine.forwards:
        assert sum(piece.num_tokens for piece in parts if piece.num_tokens > SHORT_PART) <= PREFILL_BUDGET
    sessions = [{piece.session for piece in parts} for parts in engine.forwards[1:]]
    assert all(s >= {f"short{i}" for i in range(4)} for s in sessions[:2])  # short ones never wait
    assert all({"long0", "long1"} <= s and "long2" not in s for s in sessions[:4])  # the oldest prompts first
    assert sessions[4:] == [{"long2"}] * 4


async def test_a_part_over_the_whole_budget_goes_alone():
    engine = Engine()
    engine.gate.set()
    thread = EngineThread("test", forward_parts=engine.forward_parts)
    assert (await ask(thread, engine, Ask("s", (PREFILL_BUDGET * 3,)))).cached_len == PREFILL_BUDGET * 3


async def test_calls_of_one_session_follow_each_other_and_its_release_comes_last():
    engine, released = Engine(), []
    thread, first = start(engine)
    await until_entered(engine)
    tasks = [asyncio.create_task(ask(thread, engine, Ask("s", (1, 2, 3)))) for _ in range(3)]
    await all_queued(thread, 4)
    release = asyncio.create_task(thread.release(lambda name: released.append(dict(engine.under_way)), "s"))
    await all_queued(thread, 5)
    engine.gate.set()
    await asyncio.gather(first, *tasks)
    await release
    assert released == [{"first": 0, "s": 0}]
    assert all(len(parts) == 1 for parts in engine.forwards)


async def test_a_failing_call_leaves_its_neighbours_alone():
    engine = Engine()
    thread, first = start(engine)
    await until_entered(engine)
    tasks = [asyncio.create_task(ask(thread, engine, Ask(f"s{i}", (1, 1), fails=i == 1))) for i in range(3)]
    await all_queued(thread, 4)
    engine.gate.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    await first
    assert [isinstance(outcome, InvalidRows) for outcome in outcomes] == [False, True, False]


async def test_a_failing_forward_fails_those_in_it_and_the_thread_serves_on():
    engine = Engine()
    engine.gate.set()
    thread = EngineThread("test", forward_parts=engine.forward_parts)
    engine.error = MemoryError("full")
    outcomes = await asyncio.gather(
        *(ask(thread, engine, Ask(f"s{i}", (1,))) for i in range(3)), return_exceptions=True
    )
    assert all(isinstance(outcome, EngineUnavailable) for outcome in outcomes)
    engine.error = None
    assert (await ask(thread, engine, Ask("s0", (4,)))).cached_len == 4


async def test_a_call_nobody_waits_for_is_left_between_two_forwards():
    engine = Engine()
    engine.pause_s = 0.002
    thread, first = start(engine)
    await until_entered(engine)
    task = asyncio.create_task(ask(thread, engine, Ask("gone", (1,) * 1000)))
    other = asyncio.create_task(ask(thread, engine, Ask("here", (1,) * 20)))
    await all_queued(thread, 3)
    engine.gate.set()
    await until(lambda: len(engine.forwards) >= 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.gather(first, other)
    await ask(thread, engine, Ask("gone", (1,)))  # its session is free again
    assert engine.closed == ["gone"]
    assert thread.num_queued == 0


async def test_a_thread_that_is_dropped_ends():
    before = threading.active_count()
    for _ in range(5):
        engine = Engine()
        engine.gate.set()
        thread = EngineThread("test", forward_parts=engine.forward_parts)
        await ask(thread, engine, Ask("s", (1,)))
        del thread
    for _ in range(1000):
        if threading.active_count() <= before:
            return
        await asyncio.sleep(0.01)
    pytest.fail("threads are left behind")


def test_a_call_alone_sees_the_same():
    engine = Engine()
    engine.gate.set()
    block = run_alone(engine.steps(Ask("s", (1, 2, 3))), engine.forward_parts)
    assert (block.cached_len, block.cost.num_forwards) == (6, 3)
    with pytest.raises(InvalidRows):
        run_alone(engine.steps(Ask("s", (1,), fails=True)), engine.forward_parts)
    assert [len(parts) for parts in engine.forwards] == [1, 1, 1, 1]
