"""Many answers of one verifier at once: a batch whose rows are replaced as they finish.

On a CPU the matrix products are the limit, so that everything else is kept small: prompts that begin alike are computed
once up to there, a row that ends makes room for the next prompt, nothing is padded to the longest answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdiff_dist.core.randomness import Purpose, uniforms
from specdiff_dist.core.rows import FloatArray, IntArray
from specdiff_dist.train.slots import SlotCache
from specdiff_dist.train.top_rows import TOP, draw, top_logits

_PREFILL_TOKENS = 4096  # at once, padding included: bounds the memory of a prefill


@dataclass(frozen=True, slots=True)
class Job:
    """A text to continue."""

    label: object  # the caller's own
    token_ids: IntArray  # at least one
    temperature: float  # 0 is greedy
    top_p: float
    stream: tuple[int, int]  # names its random numbers, next to the seed


@dataclass(frozen=True, slots=True)
class Written:
    """A job's continuation."""

    job: Job
    token_ids: IntArray  # int32 [t], with the token that ended it
    has_ended: bool  # not cut at the limit
    top_ids: IntArray  # int32 [t, TOP], the verifier's most probable tokens where each token was drawn, descending
    top_log_probs: FloatArray  # float16 [t, TOP], natural logarithms at temperature 1


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

        `longest`: no job has more tokens. The same jobs give the same result on the same machine, in the same order.
        """
        queue = deque(sorted(jobs, key=lambda job: -len(job.token_ids)))
        rows = _Rows(self._model, self._batch_size, longest + self._max_new_tokens, self._max_new_tokens)
        shared = _shared_prefix([job.token_ids for job in queue])
        rows.open(shared)
        while queue or rows.jobs:
            # (admitting few rows at a time would waste the prefill)
            if queue and (len(rows.jobs) <= 0.75 * self._batch_size or len(rows.jobs) + len(queue) <= self._batch_size):
                self._admit(rows, queue, shared)
            for written in self._step(rows):
                queue.extend(then(written))

    def _admit(self, rows: _Rows, queue: deque[Job], shared: IntArray) -> None:
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

    def _step(self, rows: _Rows) -> list[Written]:
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


class _Rows:
    """The rows in work: slot i of the cache and row i of every tensor belong to jobs[i]."""

    def __init__(self, model: PreTrainedModel, batch_size: int, capacity: int, max_new_tokens: int) -> None:
        self.jobs: list[Job] = []
        self._model, device = model, model.device
        config = model.config.get_text_config(decoder=True)
        # the last slot holds the tokens with which every prompt begins
        self._cache = SlotCache(config.num_hidden_layers, batch_size + 1, capacity)
        self._home = batch_size
        self._lengths = np.zeros(batch_size, np.int64)  # tokens in the cache
        self._last_ids = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.num_new = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(batch_size, device=device)
        self.top_p = torch.ones(batch_size, device=device)
        self.uniforms = torch.zeros(batch_size, max_new_tokens, device=device)
        self._token_ids = torch.zeros(batch_size, max_new_tokens, dtype=torch.int32, device=device)
        self._top_ids = torch.zeros(batch_size, max_new_tokens, TOP, dtype=torch.int32, device=device)
        self._top_log_probs = torch.zeros(batch_size, max_new_tokens, TOP, dtype=torch.float16, device=device)

    def open(self, shared: IntArray) -> None:
        """Computes the tokens with which the prompts begin."""
        if len(shared):
            self._cache.prefill(self._home, self._home + 1, 0, len(shared))
            self._forward(_ids(shared[None], self._model), np.arange(len(shared))[None], self._causal(0, len(shared)))

    def add(self, jobs: Sequence[Job], numbers: Sequence[FloatArray], shared: IntArray) -> None:
        """Takes jobs into the free rows. All but the last token of a prompt is computed here."""
        start = len(shared) if all(_begins_with(job.token_ids[:-1], shared) for job in jobs) else 0
        first, last = len(self.jobs), len(self.jobs) + len(jobs)
        lengths = np.array([len(job.token_ids) - 1 for job in jobs])
        if start:
            self._cache.copy(self._home, first, last, start)
        if lengths.max() > start:
            # padded on the right: no real token looks that far, and the answer will be written over it
            tokens = np.zeros((len(jobs), lengths.max() - start), np.int64)
            for row, job in enumerate(jobs):
                tokens[row, : lengths[row] - start] = job.token_ids[start:-1]
            end = start + tokens.shape[1]
            self._cache.prefill(first, last, start, end)
            self._forward(_ids(tokens, self._model), np.arange(start, end)[None], self._causal(start, end))
        self._lengths[first:last] = lengths
        device = self._model.device
        self._last_ids[first:last] = torch.tensor([int(job.token_ids[-1]) for job in jobs], device=device)
        self.num_new[first:last] = 0
        self.temperature[first:last] = torch.tensor([job.temperature for job in jobs], device=device)
        self.top_p[first:last] = torch.tensor([job.top_p for job in jobs], device=device)
        self.uniforms[first:last] = torch.from_numpy(np.stack(numbers)).float().to(device)
        self.jobs += jobs

    def logits(self) -> Tensor:
        """Runs each row's last token; logits [n, padded V] of what follows."""
        count = len(self.jobs)
        positions = torch.from_numpy(self._lengths[:count]).to(self._model.device)
        end = int(self._lengths[:count].max()) + 1
        self._cache.decode(positions, end)
        is_seen = torch.arange(end, device=positions.device) <= positions[:, None]
        logits = self._forward(self._last_ids[:count, None], positions[:, None], _additive(is_seen, self._model.dtype))
        self._lengths[:count] += 1
        return logits[:, 0]

    def sampled(self) -> Tensor:
        """Rows that are not greedy."""
        rows = [row for row, job in enumerate(self.jobs) if job.temperature > 0.0]
        return torch.tensor(rows, dtype=torch.int64, device=self._model.device)

    def append(self, token_ids: Tensor, top_ids: Tensor, top_log_probs: Tensor) -> None:
        count = len(self.jobs)
        rows, at = torch.arange(count, device=token_ids.device), self.num_new[:count]
        self._token_ids[rows, at] = token_ids.int()
        self._top_ids[rows, at, : top_ids.shape[1]] = top_ids.int()
        self._top_log_probs[rows, at, : top_ids.shape[1]] = top_log_probs.half()
        self._last_ids[:count] = token_ids
        self.num_new[:count] += 1

    def take(self, row: int, *, has_ended: bool) -> Written:
        """Removes a row; the last one moves into its place."""
        job, count = self.jobs[row], int(self.num_new[row])
        written = Written(
            job,
            self._token_ids[row, :count].cpu().numpy().copy(),
            has_ended,
            self._top_ids[row, :count].cpu().numpy().copy(),
            self._top_log_probs[row, :count].cpu().numpy().copy(),
        )
        last = len(self.jobs) - 1
        if row != last:
            self._cache.copy(last, row, row + 1, int(self._lengths[last]))
            self._lengths[row] = self._lengths[last]
            self.jobs[row] = self.jobs[last]
            for tensor in (
                self._last_ids, self.num_new, self.temperature, self.top_p, self.uniforms,
                self._token_ids, self._top_ids, self._top_log_probs,
            ):  # fmt: skip
                tensor[row] = tensor[last]
        self.jobs.pop()
        return written

    def _forward(self, token_ids: Tensor, positions: Tensor | np.ndarray, mask: Tensor) -> Tensor:
        if isinstance(positions, np.ndarray):
            positions = torch.from_numpy(positions).to(token_ids.device)
        output = self._model(
            input_ids=token_ids,
            position_ids=positions,
            attention_mask=mask,
            cache=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits

    def _causal(self, start: int, end: int) -> Tensor:
        position = torch.arange(end, device=self._model.device)
        return _additive(position <= position[start:, None], self._model.dtype).transpose(0, 2)


def _additive(is_seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What attention adds to its scores, [n, 1, 1, t], from bool [n, t]."""
    mask = torch.zeros(is_seen.shape, dtype=dtype, device=is_seen.device)
    return mask.masked_fill_(~is_seen, -torch.inf)[:, None, None]


def _where(is_done: Tensor, has_ended: Tensor) -> tuple[list[int], list[bool]]:
    both = torch.stack([is_done, has_ended]).cpu().numpy()
    rows = np.flatnonzero(both[0])
    return rows.tolist(), both[1][rows].tolist()


def _ids(token_ids: IntArray, model: PreTrainedModel) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(token_ids, np.int64)).to(model.device)


def _begins_with(token_ids: IntArray, prefix: IntArray) -> bool:
    return len(token_ids) >= len(prefix) and bool(np.array_equal(token_ids[: len(prefix)], prefix))


def _shared_prefix(prompts: Sequence[IntArray]) -> IntArray:
    """The longest common beginning that leaves every prompt its last token."""
    shortest = min(len(prompt) for prompt in prompts) - 1
    heads = np.stack([prompt[:shortest] for prompt in prompts])
    differs = np.flatnonzero((heads != heads[0]).any(axis=0))
    return heads[0, : differs[0] if len(differs) else shortest]
