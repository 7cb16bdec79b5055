"""Many answers of one verifier at once: a batch whose rows are replaced as they finish.

On a CPU the matrix products are the limit, so that everything else is kept small: prompts that begin alike are computed
once up to there, a row that ends makes room for the next prompt, nothing is padded to the longest answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdiff_dist.core.randomness import Purpose, uniforms
from specdiff_dist.core.rows import FloatArray, IntArray
from specdiff_dist.train.batch_rows import BatchRows
from specdiff_dist.train.jobs import Job, Written
from specdiff_dist.train.top_rows import draw, top_logits

_PREFILL_TOKENS = 4096  # at once, padding included: bounds the memory of a prefill


class BatchWriter:
    """Continues texts with a transformers model. Not thread-safe."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocab_size: int,
        stop_ids: Sequence[int],
        max_new_tokens: int,
        batch_size: int,
        seed: int,
        on_step: Callable[[int], None] = lambda num_tokens: None,
    ) -> None:
        """`on_step`: told the number of tokens that each step wrote."""
        self._model, self._vocab_size, self._seed = model, vocab_size, seed
        self._max_new_tokens, self._batch_size, self._on_step = max_new_tokens, batch_size, on_step
        self._stop_ids = torch.tensor(sorted(stop_ids), device=model.device)

    @torch.inference_mode()
    def write(self, jobs: Sequence[Job], then: Callable[[Written], Sequence[Job]], *, longest: int) -> None:
        """Continues all `jobs`, and the further ones that `then` returns when it is told of a finished one.

        `longest`: no job has more tokens. Neighbours of similar length waste least. The same jobs give the same results in
        the same order, on the same machine.
        """
        queue = deque(jobs)
        rows = BatchRows(self._model, self._batch_size, longest + self._max_new_tokens, self._max_new_tokens)
        shared = _shared_prefix([job.token_ids for job in queue])
        rows.open(shared)
        while queue or rows.jobs:
            # (admitting few rows at a time would waste the prefill)
            if queue and (len(rows.jobs) <= 0.75 * self._batch_size or len(rows.jobs) + len(queue) <= self._batch_size):
                self._admit(rows, queue, shared)
            for written in self._step(rows):
                queue.extend(then(written))

    def _admit(self, rows: BatchRows, queue: deque[Job], shared: IntArray) -> None:
        while queue and len(rows.jobs) < self._batch_size:
            group: list[Job] = []
            width = len(queue[0].token_ids)
            while queue and len(rows.jobs) + len(group) < self._batch_size:
                width = max(width, len(queue[0].token_ids))
                if group and width * (len(group) + 1) > _PREFILL_TOKENS:
                    break
                group.append(queue.popleft())
            rows.add(group, [self._uniforms(job) for job in group], shared)

    def _uniforms(self, job: Job) -> FloatArray:
        if job.temperature == 0.0:
            return np.zeros(self._max_new_tokens)
        stream, step = job.stream
        return uniforms(self._seed, Purpose.TARGET, 0, self._max_new_tokens, stream=stream, step=step)

    def _step(self, rows: BatchRows) -> list[Written]:
        """One token for every row; the rows that ended."""
        count = len(rows.jobs)
        logits = rows.logits()[:, : self._vocab_size].float()
        tops = top_logits(logits)
        next_ids = tops[1][:, 0].clone()
        sampled = rows.sampled()
        if len(sampled):
            at = rows.num_new[sampled]
            next_ids[sampled] = draw(
                logits[sampled],
                (tops[0][sampled], tops[1][sampled]),
                rows.temperature[sampled],
                rows.top_p[sampled],
                rows.uniforms[sampled, at],
            )
        rows.append(next_ids, tops[1], tops[0] - torch.logsumexp(logits, dim=-1, keepdim=True))
        has_ended = torch.isin(next_ids, self._stop_ids)
        is_done = has_ended | (rows.num_new[:count] >= self._max_new_tokens)
        self._on_step(count)
        done = [(int(row), bool(ended)) for row, ended in zip(*_where(is_done, has_ended), strict=True)]
        return [rows.take(row, has_ended=ended) for row, ended in reversed(done)]


def _where(is_done: Tensor, has_ended: Tensor) -> tuple[list[int], list[bool]]:
    both = torch.stack([is_done, has_ended]).cpu().numpy()
    rows = np.flatnonzero(both[0])
    return rows.tolist(), both[1][rows].tolist()


def _shared_prefix(prompts: Sequence[IntArray]) -> IntArray:
    """The longest common beginning that leaves every prompt its last token."""
    shortest = min(len(prompt) for prompt in prompts) - 1
    heads = np.stack([prompt[:shortest] for prompt in prompts])
    differs = np.flatnonzero((heads != heads[0]).any(axis=0))
    return heads[0, : differs[0] if len(differs) else shortest]
