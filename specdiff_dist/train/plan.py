"""Which prompt is answered when: a pure function of the sources and the seed, as long as one wants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

MAX_USES = 4  # of a file's prompt: once greedy, the others sampled


@dataclass(frozen=True, slots=True)
class Task:
    """One answer to be made."""

    source: int
    prompt: int  # number within the file; for a source without end a running number
    is_greedy: bool
    number: int  # of the answer, over all sources


@dataclass(frozen=True, slots=True)
class Source:
    """Where prompts come from."""

    share: float  # of all answers, as long as it has prompts
    num_prompts: int | None  # None: the verifier writes them, without end


def shares(file_sizes: Sequence[int], self_written: float) -> list[float]:
    """A share per file, by the square root of its size (a small file is answered more often, a large one does not drown
    it), and last the share of self-written prompts."""
    roots = np.sqrt(np.asarray(file_sizes, float))
    of_files = (1.0 - self_written) * roots / roots.sum() if len(roots) else []
    return [round(float(share), 6) for share in of_files] + [self_written if len(roots) else 1.0]


def plan(sources: Sequence[Source], seed: int) -> Iterator[Task]:
    """Tasks in order, sources mixed by their shares all along. Ends when every source has.

    A file's prompts come in an order drawn from the seed, up to MAX_USES times each: greedy in one of the first two rounds.
    """
    order = [
        np.random.Generator(np.random.Philox(key=[seed, index])).permutation(source.num_prompts or 0)
        for index, source in enumerate(sources)
    ]
    taken = [0] * len(sources)
    credit = [0.0] * len(sources)
    number = 0
    while True:
        live = [i for i, source in enumerate(sources) if source.share > 0 and _has_more(source, taken[i])]
        if not live:
            return
        total = sum(sources[i].share for i in live)
        for i in live:
            credit[i] += sources[i].share / total
        chosen = max(live, key=lambda i: credit[i])
        credit[chosen] -= 1.0
        size, use = sources[chosen].num_prompts, taken[chosen]
        taken[chosen] += 1
        if size is None:
            yield Task(chosen, use, use % 2 == 0, number)
        else:
            which_round, at = divmod(use, size)
            is_greedy = which_round < 2 and (at + which_round) % 2 == 0
            yield Task(chosen, int(order[chosen][at]), is_greedy, number)
        number += 1


def _has_more(source: Source, taken: int) -> bool:
    return source.num_prompts is None or taken < MAX_USES * source.num_prompts
