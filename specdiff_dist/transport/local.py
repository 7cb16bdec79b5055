"""Roles over engines in this process."""

from __future__ import annotations

import dataclasses
from time import perf_counter

from specdiff_dist.errors import DrafterUnavailable, VerifierUnavailable
from specdiff_dist.roles import DrafterEngine, VerifierEngine
from specdiff_dist.transport.checks import (
    check_draft_block,
    check_draft_call,
    check_resolve_call,
    check_resolved,
    check_target_rows,
    check_verify_call,
)
from specdiff_dist.transport.engine_thread import DEFAULT_MAX_QUEUED, EngineUnavailable, drafter_thread, verifier_thread
from specdiff_dist.types import (
    DraftBlock,
    DraftCall,
    DrafterInfo,
    ResolveCall,
    ResolvedToken,
    TargetRows,
    VerifierInfo,
    VerifyCall,
)


class LocalDrafter:
    """A Drafter over an engine; whose calls run in a thread of their own."""

    def __init__(self, engine: DrafterEngine, *, max_queued: int = DEFAULT_MAX_QUEUED) -> None:
        self.engine = engine
        self._thread, self._draft = drafter_thread(engine, max_queued=max_queued)

    @property
    def num_queued(self) -> int:
        """Calls that wait or run right now."""
        return self._thread.num_queued

    async def info(self) -> DrafterInfo:
        return self.engine.info

    async def draft(self, call: DraftCall) -> DraftBlock:
        started = perf_counter()
        info = self.engine.info
        check_draft_call(call, info)
        try:
            block = await self._draft(call)
        except EngineUnavailable as error:
            raise DrafterUnavailable(str(error)) from error
        check_draft_block(block, call, info)
        cost = dataclasses.replace(block.cost, wall_s=perf_counter() - started)
        return dataclasses.replace(block, cost=cost)

    async def release(self, session_id: str) -> None:
        await self._thread.release(self.engine.release, session_id)

    async def close(self) -> None:
        """Stops the thread; later calls raise DrafterUnavailable."""
        self._thread.close()


class LocalVerifier:
    """A Verifier over an engine; whose calls run in a thread of their own."""

    def __init__(self, engine: VerifierEngine, *, max_queued: int = DEFAULT_MAX_QUEUED) -> None:
        self.engine = engine
        self._thread, self._verify = verifier_thread(engine, max_queued=max_queued)

    @property
    def num_queued(self) -> int:
        """Calls that wait or run right now."""
        return self._thread.num_queued

    async def info(self) -> VerifierInfo:
        return self.engine.info

    async def verify(self, call: VerifyCall) -> TargetRows:
        started = perf_counter()
        info = self.engine.info
        check_verify_call(call, info)
        try:
            target = await self._verify(call)
        except EngineUnavailable as error:
            raise VerifierUnavailable(str(error)) from error
        check_target_rows(target, call, info)
        cost = dataclasses.replace(target.cost, wall_s=perf_counter() - started)
        return dataclasses.replace(target, cost=cost)

    async def resolve(self, call: ResolveCall) -> ResolvedToken:
        started = perf_counter()
        check_resolve_call(call, self.engine.info)
        try:
            resolved = await self._thread.call(self.engine.resolve, call, session_id=call.session_id)
        except EngineUnavailable as error:
            raise VerifierUnavailable(str(error)) from error
        check_resolved(resolved, self.engine.info)
        cost = dataclasses.replace(resolved.cost, wall_s=perf_counter() - started)
        return dataclasses.replace(resolved, cost=cost)

    async def release(self, session_id: str) -> None:
        await self._thread.release(self.engine.release, session_id)

    async def close(self) -> None:
        """Stops the thread; later calls raise VerifierUnavailable."""
        self._thread.close()
