"""Ours in a speed measurement, in this process: pairs over one verifier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

from specdiff_dist.bench.speed import Answer, Rounds, Task

if TYPE_CHECKING:
    from specdiff_dist.api import GenerateOptions, Pair

NO_DRAFTER = "none"


class LocalContender:
    """A pair under fixed options. Everything from the prompt's text to the last token's text is timed."""

    def __init__(self, pair: Pair, options: GenerateOptions) -> None:
        self._pair, self._options = pair, options

    def __call__(self, task: Task) -> Answer:
        options: GenerateOptions = {**self._options, "seed": task.seed, "ignore_eos": True}
        chunks, first_s = [], None
        started = perf_counter()
        for chunk in self._pair.stream(task.prompt, **options):
            if first_s is None:
                first_s = perf_counter() - started
            chunks.append(chunk)
        seconds = perf_counter() - started
        receipt = chunks[-1].receipt
        if receipt is None:
            raise ValueError("the stream ended without a receipt")
        return Answer(
            tuple(token for chunk in chunks for token in chunk.token_ids),
            seconds,
            first_s,
            len(chunks[0].token_ids),
            Rounds(
                receipt.num_rounds,
                receipt.acceptance_histogram,
                receipt.total_tv,
                tuple(record for chunk in chunks for record in chunk.rounds),
            ),
        )


@contextmanager
def loaded_pairs(
    model: str,
    drafters: Sequence[str],
    *,
    dtype: str,
    num_threads: int | None,
    progress: Callable[[str], None] | None = None,
) -> Iterator[list[Pair]]:
    """A pair without a drafter, then one per drafter, over one verifier engine. What policies learn is each pair's own.

    Raises as `load_pair`.
    """
    from specdiff_dist.api import Pair, load_pair
    from specdiff_dist.drafters import load_drafter, split_name

    with ExitStack() as opened:
        plain = load_pair(model, drafter=None, dtype=dtype, num_threads=num_threads, progress=progress)
        pairs = [opened.enter_context(plain)]
        for name in drafters:
            drafter, (inner, copies) = None, split_name(name)
            if name != NO_DRAFTER:
                drafter = load_drafter(inner, verifier=model, num_threads=num_threads)
            pair = Pair(plain.folder, plain.tokenizer, drafter, plain.verifier.engine, copies=copies)
            pairs.append(opened.enter_context(pair))
        yield pairs
