"""What is done to a verifier's logits before sampling parameters, and what is read off them as they are."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specdiff_dist.core.logit_processing import LogitProcessing, count_occurrences
from specdiff_dist.core.logprobs import TargetLogprobs
from specdiff_dist.core.rows import IntArray
from specdiff_dist.errors import InvalidRequest
from specdiff_dist.types import TargetRows, VerifyCall


def process_logits(logits: Tensor, call: VerifyCall, token_ids: IntArray | None) -> Tensor:
    """The logits after `call.processing` (core/logit_processing.py), a copy; the same tensor where there is none.

    Args:
        logits: float32 [d + 1, V], after the anchor and after each draft token.
        token_ids: the call's committed and draft tokens; needed for penalties alone.
    """
    processing = call.processing
    if processing is None:
        return logits
    logits = logits.clone()
    if processing.allowed_token_ids:
        allowed = _ids(processing.allowed_token_ids, logits)
        kept = logits.index_select(1, allowed)
        logits.fill_(-torch.inf).index_copy_(1, allowed, kept)
    num_early = call.num_prompt_tokens + processing.min_tokens - call.prefix.num_committed
    if num_early > 0 and call.ending_token_ids:
        logits[:num_early].index_fill_(1, _ids(call.ending_token_ids, logits), -torch.inf)
    if processing.bias_token_ids:
        biases = torch.tensor(processing.biases, dtype=logits.dtype, device=logits.device)
        logits.index_add_(1, _ids(processing.bias_token_ids, logits), biases.expand(len(logits), -1))
    if processing.has_penalties:
        _penalise(logits, processing, call, token_ids)
    return logits


def _penalise(logits: Tensor, processing: LogitProcessing, call: VerifyCall, token_ids: IntArray | None) -> None:
    """Repetition, frequency and presence penalty, in place, for the few tokens that occur at all."""
    if token_ids is None or len(token_ids) != call.prefix.num_committed + len(call.draft_token_ids):
        raise InvalidRequest("penalties need all committed and draft tokens")
    num_prompt = call.num_prompt_tokens
    if processing.repetition_penalty == 1.0:  # the prompt means nothing to the other two
        token_ids, num_prompt = token_ids[num_prompt:], 0
    occur = count_occurrences(token_ids, num_prompt, len(logits))
    columns = torch.from_numpy(occur.token_ids).to(logits.device)
    in_output = torch.from_numpy(occur.in_output).to(logits.device, logits.dtype)
    found = logits.index_select(1, columns)
    if processing.repetition_penalty != 1.0:
        in_prompt = torch.from_numpy(occur.in_prompt).to(logits.device)
        penalty = processing.repetition_penalty
        found = torch.where(
            (in_output > 0) | in_prompt, torch.where(found > 0, found / penalty, found * penalty), found
        )
    found -= processing.frequency_penalty * in_output
    found -= processing.presence_penalty * (in_output > 0)
    logits.index_copy_(1, columns, found)


def read_logprobs(logits: Tensor, target: TargetRows, call: VerifyCall) -> TargetLogprobs:
    """The logprobs that go with a reply: of everything that can come of its positions, and the most probable tokens.

    Args:
        logits: float32 [d + 1, V], raw.
    """
    num_draft, num_top = len(call.draft_token_ids), min(call.num_logprobs or 0, logits.shape[-1])
    normaliser = torch.logsumexp(logits, dim=-1)
    best = torch.topk(logits, num_top, dim=-1)
    top = best.values - normaliser[:, None]

    def of(row_index: np.ndarray, token_ids: IntArray) -> np.ndarray:
        rows, ids = (torch.from_numpy(index.astype(np.int64)).to(logits.device) for index in (row_index, token_ids))
        return (logits[rows, ids] - normaliser[rows]).cpu().numpy()

    recovered, plain = target.recovered_token_ids, target.plain_token_ids
    every = np.arange(num_draft + 1)
    return TargetLogprobs(
        best.indices.to(torch.int32).cpu().numpy(),
        top.cpu().numpy(),
        of(every[:-1], call.draft_token_ids),
        None if target.is_wide else of(target.rows.row_index(), target.rows.token_ids),
        None if recovered is None else of(every[:-1], recovered),
        None if plain is None else of(every, plain),
    )


def token_logprob(logits: Tensor, token_id: int) -> float:
    """Log-softmax of one token; `logits`: float32 [V]."""
    return float(logits[token_id] - torch.logsumexp(logits, dim=-1))


def _ids(token_ids: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.tensor(token_ids, dtype=torch.int64, device=like.device)
