"""The denoising loop: which positions of a masked block are revealed when, and what is recorded as their proposals.

Pure NumPy that asks for its predictions, so that the real model and a table can stand behind the same loop.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdiff_dist.config import Effort
from specdiff_dist.core import sampling as draws
from specdiff_dist.core.randomness import Purpose, uniforms
from specdiff_dist.core.rows import FloatArray, IntArray, SparseRows
from specdiff_dist.errors import InvalidRows
from specdiff_dist.types import SamplingParams

MASKED = -1  # in place of a token id


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """What the model says about some masked positions, one row each.

    `rows` are the proposals: temperature, top-k and top-p applied, never more than `draft_top_k` entries, one-hot if
    greedy. The other two describe the model's distribution at temperature 1, before truncation, so they mean the same at
    every temperature and never depend on what is sampled from this row.
    """

    rows: SparseRows
    max_probs: NDArray[np.float32]  # largest probability
    entropies: NDArray[np.float32]  # nats; only their order matters


# (block so far int32 [n], MASKED where unknown; positions wanted int64 [k], ascending, all masked)
Wanted = tuple[IntArray, NDArray[np.int64]]
Predict = Callable[[IntArray, NDArray[np.int64]], Prediction]  # of what is wanted -> k rows

Denoised = tuple[IntArray, SparseRows, NDArray[np.float32], NDArray[np.float32]]


def denoise(predict: Predict, *args: Any, **options: Any) -> Denoised:
    """`denoising` with every prediction made by `predict`."""
    steps = denoising(*args, **options)
    try:
        wanted = next(steps)
        while True:
            wanted = steps.send(predict(*wanted))
    except StopIteration as finished:
        return finished.value


def denoising(
    num_tokens: int,
    effort: Effort,
    sampling: SamplingParams,
    draft_top_k: int,
    seed: int,
    anchor_position: int,
    num_drafted_before: int = 0,
) -> Generator[Wanted, Prediction, Denoised]:
    """Denoises a block of `num_tokens` draft tokens, as a coroutine that yields what it wants predicted, in K = min(num_denoising_steps, num_tokens) steps.

    Step s reveals n // K positions, one more while s < n mod K, chosen among the masked ones by `effort.reveal_order`
    (of equals the leftmost); only positions that need a token are drawn. Numbers: uniforms(seed, DRAFT, 0, n,
    stream=anchor_position, step=s), element j for position j. A block drafted after `num_drafted_before` tokens of the
    same round has numbers of its own (they go into the step's upper half).

    Returns `(token_ids [n], proposals, confidences [n], max_probs [n])`: proposal j is the row that token j was drawn
    from when it was revealed (one-hot instead if it was revealed before the last step and `early_reveal` says so);
    confidence j is the token's probability in that row, for greedy drafts its probability at temperature 1;
    max_probs j is `Prediction.max_probs` at that moment.

    Raises InvalidRows when a row has more than `draft_top_k` entries.
    """
    block = np.full(num_tokens, MASKED, np.int32)
    rows: list[SparseRows] = [_NO_ROW] * num_tokens
    confidences, max_probs = np.zeros(num_tokens, np.float32), np.zeros(num_tokens, np.float32)
    num_steps = min(effort.num_denoising_steps, num_tokens)
    stream_of_block = num_drafted_before << 32

    for step in range(num_steps):
        count = num_tokens // num_steps + (step < num_tokens % num_steps)
        masked = np.flatnonzero(block == MASKED)
        wanted = masked[:count] if effort.reveal_order == "left_to_right" else masked
        prediction = yield block.copy(), wanted
        _check(prediction, len(wanted), draft_top_k)
        numbers = uniforms(seed, Purpose.DRAFT, 0, num_tokens, stream=anchor_position, step=step | stream_of_block)[
            wanted
        ]

        if effort.reveal_order == "token_prob":  # the choice looks at the sampled tokens: draw them all first
            sampled = _draw(prediction, np.arange(len(wanted)), numbers, sampling)
            chosen = _largest(sampled[1], count)
            tokens, probs = sampled[0][chosen], sampled[1][chosen]
        else:
            chosen = _largest(_score(prediction, effort.reveal_order), count)
            tokens, probs = _draw(prediction, chosen, numbers, sampling)

        is_early = step < num_steps - 1 and effort.early_reveal == "one_hot"
        for index, token in zip(chosen, tokens, strict=True):
            is_certain = is_early or sampling.is_greedy
            rows[wanted[index]] = SparseRows.one_hot([token]) if is_certain else _row(prediction.rows, index)
        positions = wanted[chosen]
        block[positions], confidences[positions] = tokens, probs
        max_probs[positions] = prediction.max_probs[chosen]
    return block, SparseRows.concatenate(rows), confidences, max_probs


_NO_ROW = SparseRows.from_rows([])


def _score(prediction: Prediction, reveal_order: str) -> NDArray[np.floating]:
    """The larger, the earlier a position is revealed."""
    if reveal_order == "max_prob":
        return prediction.max_probs
    if reveal_order == "entropy":
        return -prediction.entropies
    return np.zeros(prediction.rows.num_rows)  # left_to_right: all that were asked for


def _largest(scores: NDArray[np.floating], count: int) -> NDArray[np.int64]:
    """Indices of the `count` largest scores, ascending; of equal ones the first."""
    return np.sort(np.argsort(-scores, kind="stable")[:count])


def _draw(
    prediction: Prediction, which: NDArray[np.int64], numbers: FloatArray, sampling: SamplingParams
) -> tuple[IntArray, FloatArray]:
    """Tokens of the rows `which` and their probabilities (greedy: the largest entry, with its probability at T = 1)."""
    rows, probs = prediction.rows, prediction.rows.normalised()
    tokens, token_probs = np.zeros(len(which), np.int32), np.zeros(len(which))
    for slot, index in enumerate(which):
        start, stop = rows.row_splits[index], rows.row_splits[index + 1]
        row = probs[start:stop]
        at = int(np.argmax(row)) if sampling.is_greedy else draws.draw_index(row, float(numbers[index]))
        tokens[slot] = rows.token_ids[start + at]
        token_probs[slot] = prediction.max_probs[index] if sampling.is_greedy else row[at]
    return tokens, token_probs


def _row(rows: SparseRows, index: int) -> SparseRows:
    return SparseRows.from_rows([rows.row(index)])


def _check(prediction: Prediction, num_wanted: int, draft_top_k: int) -> None:
    if prediction.rows.num_rows != num_wanted:
        raise InvalidRows(f"{num_wanted} positions were to be predicted, not {prediction.rows.num_rows}")
    widest = int(np.diff(prediction.rows.row_splits).max(initial=0))
    if widest > draft_top_k:
        raise InvalidRows(f"a proposal has {widest} tokens; a drafter truncates to draft_top_k = {draft_top_k} first")
