"""The loop of an engine's thread: joins what many sessions' calls need forwarded.

Every turn takes what has arrived, runs each call to its next forward, and makes one forward of all that is wanted. Short
parts (verifying, plain decoding, drafting) always go; of long ones (pieces of prompts) as many as fit into
`prefill_budget`, the oldest first, so that a long prompt makes nobody wait for more than a piece of it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from time import perf_counter
from typing import Any

from specdiff_dist.transport.engine_job import Job

SHORT_PART = 64  # tokens; longer parts are pieces of a prompt
PREFILL_BUDGET = 256  # tokens of long parts in one forward, one part at least

ForwardParts = Callable[[Sequence[Any]], Sequence[Any]]


class EngineLoop:
    """Jobs come in from any thread and are run in one. Jobs of a session run one after another, in their order."""

    def __init__(self, name: str, forward_parts: ForwardParts | None, *, prefill_budget: int = PREFILL_BUDGET) -> None:
        """`forward_parts`: a batching engine's; None for engines whose calls are functions."""
        self._forward_parts, self._prefill_budget = forward_parts, prefill_budget
        self._arrived: deque[Job] = deque()
        self._wake = threading.Condition()  # also guards what follows
        self._is_closed = False
        self.num_queued = 0  # jobs that wait or run
        # A daemon: a call that never ends must not keep the process from ending.
        threading.Thread(target=self._run, name=f"specdiff-{name}", daemon=True).start()

    def submit(self, job: Job) -> bool:
        """Whether the job was taken: not after `close`."""
        with self._wake:
            if self._is_closed:
                return False
            self.num_queued += 1
            self._arrived.append(job)
            self._wake.notify()
        job.future.add_done_callback(self._count_down)
        return True

    def close(self) -> None:
        """Drops the jobs that wait; those that have started still finish. Safe to call again."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()

    def _count_down(self, _: Future[Any]) -> None:
        with self._wake:
            self.num_queued -= 1

    def _run(self) -> None:
        waiting: deque[Job] = deque()
        active: list[Job] = []
        while True:
            with self._wake:
                while not (self._arrived or waiting or active or self._is_closed):
                    self._wake.wait()
                waiting.extend(self._arrived)
                self._arrived.clear()
                is_closed = self._is_closed
            if is_closed:
                for job in waiting:
                    job.future.cancel()
                waiting.clear()
                if not active:
                    return
            waiting = self._start(waiting, active)
            active = [job for job in active if not job.close_if_abandoned()]
            if active:
                self._forward(active)
                active = [job for job in active if not job.is_done]

    def _start(self, waiting: deque[Job], active: list[Job]) -> deque[Job]:
        """Starts what may start, in order; what is returned waits for another job of its session."""
        busy = {job.session_id for job in active}
        held: deque[Job] = deque()
        for job in waiting:
            if job.session_id in busy:
                held.append(job)
                continue
            job.start()
            if not job.is_done:
                active.append(job)
                busy.add(job.session_id)
        return held

    def _forward(self, active: list[Job]) -> None:
        """One forward of what active jobs want, and each one's way to its next."""
        chosen = self._chosen(active)
        started = perf_counter()
        try:
            assert self._forward_parts is not None, "only a batching engine has calls in steps"
            results = self._forward_parts([job.part for job in chosen])
        except BaseException as error:  # noqa: BLE001 (each call judges for itself what it means for its session)
            for job in chosen:
                job.fail(error)
            return
        took_s = perf_counter() - started
        num_tokens = sum(job.num_tokens for job in chosen)
        for job, result in zip(chosen, results, strict=True):
            job.go_on(result, forward_s=took_s, batch_size=len(chosen), batch_tokens=num_tokens)

    def _chosen(self, active: list[Job]) -> list[Job]:
        chosen: list[Job] = []
        left = self._prefill_budget
        for job in active:
            if job.num_tokens > SHORT_PART:
                if job.num_tokens > left < self._prefill_budget:
                    continue
                left -= job.num_tokens
            chosen.append(job)
        return chosen
