"""The numbers of a load measurement.

Inter-token latency: a chunk of n tokens that comes a gap g after the one before counts as n tokens with g / n each. A
client that shows tokens at an even pace waits just that; all latencies of an answer add up to its decoding time, with
speculation and without. The other way, one wait of g and n - 1 of nothing, makes the median meaningless: with two or more
tokens a chunk it is 0, however slow the server. How long nothing at all came is `p99_gap_ms`. The first chunk has no gap
before it; it counts as time to first token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from specdiff_dist.bench.load import Point, Run, Streamed

Interval = tuple[float, float, int]  # start and end in seconds, sessions in the forward


def token_latencies(answer: Streamed) -> list[float]:
    """Seconds before each token but those of the first chunk."""
    return [gap / count for gap, count in _gaps(answer) for _ in range(count)]


def point_report(point: Point, *, is_greedy: bool) -> dict[str, Any]:
    """The JSON of one point. Times in milliseconds, over all repeats; `plain_…`: with speculation off.

    `lost` counts requests of both kinds that did not end with their full answer, `retried` how often one was told to come
    back later; a retried one is not lost. `different`: greedy answers that are not token for token the first plain answer
    to their prompt; None where text is sampled.
    """
    answers = _answers((*point.on, *point.off))
    ratios = [
        on.tokens_per_s / off.tokens_per_s for on, off in zip(point.on, point.off, strict=True) if off.tokens_per_s
    ]
    load = {"concurrency": point.concurrency} if point.rate is None else {"rate": point.rate}
    return {
        **load,
        "ratio": median(ratios) if ratios else None,
        "ratio_spread": [min(ratios), max(ratios)] if ratios else None,
        **_side(point.on),
        **{f"plain_{name}": value for name, value in _side(point.off).items()},
        "lost": sum(not answer.is_whole for answer in answers),
        "failures": dict(Counter(answer.failure for answer in answers if answer.failure is not None)),
        "retried": sum(answer.num_retries for answer in answers),
        "different": num_different(point) if is_greedy else None,
        "num_requests": len(point.on[0].answers),
        "repeats": len(point.on),
    }


def num_different(point: Point) -> int:
    """Whole answers that are not the first whole plain answer to the same prompt."""
    expected: dict[int, tuple[int, ...]] = {}
    for answer in _answers(point.off):
        if answer.is_whole:
            expected.setdefault(answer.prompt, answer.token_ids)
    whole = [answer for answer in _answers((*point.off, *point.on)) if answer.is_whole]
    return sum(answer.token_ids != expected.get(answer.prompt, answer.token_ids) for answer in whole)


def overlap_report(intervals: Mapping[str, Iterable[Interval]], run: Run) -> dict[str, Any]:
    """How long the engines were at work during `run`: `{role}_busy_s`, `wall_s`, and `overlap`, all busy time over wall
    time, which is over 1 only where they worked side by side."""
    wall_s = run.end_s - run.start_s
    busy = {role: _busy_s(each, run.start_s, run.end_s) for role, each in intervals.items()}
    return {
        **{f"{role}_busy_s": seconds for role, seconds in busy.items()},
        "wall_s": wall_s,
        "overlap": sum(busy.values()) / wall_s,
    }


def _busy_s(intervals: Iterable[Interval], start_s: float, end_s: float) -> float:
    return sum(max(min(end, end_s) - max(start, start_s), 0.0) for start, end, _ in intervals)


def _side(runs: Sequence[Run]) -> dict[str, Any]:
    whole = [answer for answer in _answers(runs) if answer.is_whole]
    speeds = [run.tokens_per_s for run in runs]
    latencies = [latency for answer in whole for latency in token_latencies(answer)]
    gaps = [gap for answer in whole for gap, _ in _gaps(answer)]
    first = [answer.chunks[0][0] - answer.sent_s for answer in whole]
    return {
        "tokens_per_s": median(speeds),
        "tokens_per_s_spread": [min(speeds), max(speeds)],
        "p50_itl_ms": _percentile_ms(latencies, 50),
        "p99_itl_ms": _percentile_ms(latencies, 99),
        "p99_gap_ms": _percentile_ms(gaps, 99),
        "p50_ttft_ms": _percentile_ms(first, 50),
        "p99_ttft_ms": _percentile_ms(first, 99),
    }


def _gaps(answer: Streamed) -> list[tuple[float, int]]:
    """Seconds from each chunk to the next, and the tokens that the next one brought."""
    pairs = zip(answer.chunks, answer.chunks[1:], strict=False)
    return [(at - before, count) for (before, _), (at, count) in pairs]


def _answers(runs: Iterable[Run]) -> list[Streamed]:
    return [answer for run in runs for answer in run.answers]


def _percentile_ms(seconds: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(seconds, percent)) * 1e3 if seconds else None
