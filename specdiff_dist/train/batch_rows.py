"""The rows of a batch that are in work, and their forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdiff_dist.core.rows import FloatArray, IntArray
from specdiff_dist.train.jobs import Job, Written
from specdiff_dist.train.slots import SlotCache
from specdiff_dist.train.top_rows import TOP


class BatchRows:
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
            tokens = np.zeros((len(jobs), lengths.max() - start), np.int32)
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


def _ids(token_ids: IntArray, model: PreTrainedModel) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(token_ids, np.int64)).to(model.device)


def _begins_with(token_ids: IntArray, prefix: IntArray) -> bool:
    return len(token_ids) >= len(prefix) and bool(np.array_equal(token_ids[: len(prefix)], prefix))
