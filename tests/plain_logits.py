"""Logit processing and logprobs by the plainest code possible, one position at a time: what the fast code must equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from specdiff_dist.core.logit_processing import LogitProcessing
from specdiff_dist.core.logprobs import TargetLogprobs
from specdiff_dist.core.rows import SparseRows
from specdiff_dist.types import TargetRows, VerifyCall


def plain_processed(
    logits: np.ndarray,
    processing: LogitProcessing | None,
    prompt: Sequence[int],
    output: Sequence[int],
    ending: Sequence[int] = (),
) -> np.ndarray:
    """float32 [vocab_size]: the logits after `prompt` and `output`, as vLLM documents its parameters."""
    if processing is None:
        return logits
    changed = logits.astype(np.float64)
    for token in range(len(changed)):
        is_allowed = not processing.allowed_token_ids or token in processing.allowed_token_ids
        if not is_allowed or (len(output) < processing.min_tokens and token in ending):
            changed[token] = -np.inf
    for token, bias in zip(processing.bias_token_ids, processing.biases, strict=True):
        changed[token] += bias
    counts = Counter(output)
    for token in {*prompt, *output}:
        penalty = processing.repetition_penalty
        changed[token] = changed[token] / penalty if changed[token] > 0 else changed[token] * penalty
        if counts[token]:
            changed[token] -= processing.frequency_penalty * counts[token] + processing.presence_penalty
    return changed.astype(np.float32)


def processed_rows(logits: list[np.ndarray], call: VerifyCall, tokens: tuple[int, ...]) -> list[np.ndarray]:
    """The rows of a verify call; `tokens`: all committed and draft tokens."""
    prompt, first = tokens[: call.num_prompt_tokens], call.prefix.num_committed
    return [
        plain_processed(row, call.processing, prompt, tokens[len(prompt) : first + i], call.ending_token_ids)
        for i, row in enumerate(logits)
    ]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float32 [vocab_size], by way of float64."""
    shifted = logits.astype(np.float64) - logits.max()
    return (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)


def plain_logprobs(logits: list[np.ndarray], target: TargetRows, call: VerifyCall) -> TargetLogprobs | None:
    """What goes with a reply that was made from these raw logits."""
    if call.num_logprobs is None:
        return None
    values = [log_softmax(row) for row in logits]
    top = [np.argsort(-row, kind="stable")[: call.num_logprobs] for row in values]

    def of(token_ids: np.ndarray) -> np.ndarray:
        return np.array([values[i][token] for i, token in enumerate(token_ids.tolist())], np.float32)

    rows: SparseRows = target.rows
    return TargetLogprobs(
        np.stack(top).astype(np.int32),
        np.stack([row[ids] for row, ids in zip(values, top, strict=True)]),
        of(call.draft_token_ids),
        None if target.is_wide else np.stack(values)[rows.row_index(), rows.token_ids],
        None if target.recovered_token_ids is None else of(target.recovered_token_ids),
        None if target.plain_token_ids is None else of(target.plain_token_ids),
    )
