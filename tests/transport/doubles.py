"""Calls and engines for the transport tests, on top of tests/doubles.py."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from specdiff_dist.config import Effort
from specdiff_dist.core.rows import SparseRows
from specdiff_dist.types import (
    DraftBlock,
    DraftCall,
    PrefixStatement,
    ResolveCall,
    ResolvedToken,
    SamplingParams,
    TargetRows,
    VerifyCall,
    prefix_crc,
)
from tests.doubles import ScriptedDrafter, TableVerifier, greedy_script, random_table

VOCAB = 50
TABLE = random_table(VOCAB, order=3)
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
WAIT_S = 10.0  # nothing here takes long: running into it is a failure


def table_verifier(**options: Any) -> TableVerifier:
    return TableVerifier(TABLE, VOCAB, **options)


def scripted_drafter(**options: Any) -> ScriptedDrafter:
    return ScriptedDrafter(greedy_script(TABLE), VOCAB, **options)


def statement(
    tokens: tuple[int, ...] = PROMPT, *, cached: int = 0, round_index: int = 0, session_id: str = "session"
) -> PrefixStatement:
    """States `tokens` as committed, the first `cached` of them as cached."""
    ids = np.array(tokens, np.int32)
    return PrefixStatement(session_id, round_index, cached, prefix_crc(ids[:cached]), ids[cached:])


def draft_call(prefix: PrefixStatement | None = None, num_draft_tokens: int = 4, *, seed: int = 7) -> DraftCall:
    return DraftCall(prefix or statement(), num_draft_tokens, Effort(2), SamplingParams(0.7, 11, 0.9), 64, seed)


def verify_call(
    prefix: PrefixStatement | None = None,
    draft: tuple[int, ...] = (7, 8, 9),
    *,
    sampling: SamplingParams | None = None,
    with_proposals: bool = True,
) -> VerifyCall:
    """Draft tokens with proposals of uneven widths, drawn with a fixed generator."""
    rng = np.random.default_rng(5)
    rows = []
    for width, token in enumerate(draft, start=3):
        ids = np.union1d(rng.choice(VOCAB, width, replace=False), [token])
        rows.append((ids, rng.dirichlet(np.ones(len(ids)))))
    return VerifyCall(
        prefix or statement(),
        np.array(draft, np.int32),
        sampling or SamplingParams(),
        SparseRows.from_rows(rows) if with_proposals else None,
        rng.random(len(draft) + 1),
    )


class Direct:
    """A role that calls its engine and nothing else."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    async def info(self) -> Any:
        return self.engine.info

    async def draft(self, call: DraftCall) -> DraftBlock:
        return self.engine.draft(call)

    async def verify(self, call: VerifyCall) -> TargetRows:
        return self.engine.verify(call)

    async def resolve(self, call: ResolveCall) -> ResolvedToken:
        return self.engine.resolve(call)

    async def release(self, session_id: str) -> None:
        self.engine.release(session_id)


class Answering:
    """Any engine with its answers passed through `change`."""

    def __init__(self, engine: Any, change: Callable[[Any], Any]) -> None:
        self.engine, self.change = engine, change
        self.info = engine.info

    @property
    def num_sessions(self) -> int:
        return self.engine.num_sessions

    def draft(self, call: DraftCall) -> DraftBlock:
        return self.change(self.engine.draft(call))

    def verify(self, call: VerifyCall) -> TargetRows:
        return self.change(self.engine.verify(call))

    def resolve(self, call: ResolveCall) -> ResolvedToken:
        return self.change(self.engine.resolve(call))

    def release(self, session_id: str) -> None:
        self.engine.release(session_id)


class Gated(Answering):
    """Any engine whose answers are held back until `gate` is set: `entered` says that a call is inside."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine, self._hold)
        self.gate, self.entered = threading.Event(), threading.Event()

    def _hold(self, reply: Any) -> Any:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        return reply


def raising(error: BaseException) -> Callable[[Any], Any]:
    def change(reply: Any) -> Any:
        raise error

    return change


def with_fields(**changes: Any) -> Callable[[Any], Any]:
    return lambda reply: dataclasses.replace(reply, **changes)


def same_arrays(one: Any, other: Any) -> bool:
    """Whether two values are equal to the bit, dtypes included. Costs are left out: they are measurements."""
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one) if field.name != "cost"]
        return type(one) is type(other) and all(same_arrays(getattr(one, n), getattr(other, n)) for n in names)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return type(one) is type(other) and one == other


async def entered(engine: Gated) -> None:
    assert await asyncio.to_thread(engine.entered.wait, WAIT_S)


async def queued(transport: Any, num_calls: int) -> None:
    """Waits until so many calls have arrived at the engines and are not answered."""
    async with asyncio.timeout(WAIT_S):
        while await transport.num_queued() != num_calls:  # noqa: ASYNC110 -- it changes in the thread of an engine
            await asyncio.sleep(0.002)
