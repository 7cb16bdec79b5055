"""`specdiff bench speed`: ours against what a user has for nothing, prompt by prompt in one run.

Every contender answers the same token ids with the same number of new tokens (an EOS token is a token like any other),
one request at a time. They take turns on each prompt, in an order that rotates from prompt to prompt, so that a machine
that slows down or speeds up does so for all of them alike. Prefill is included: it is what a user waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from specdiff_dist.bench.round_split import split_rounds
from specdiff_dist.errors import InvalidConfig
from specdiff_dist.types import RoundRecord

if TYPE_CHECKING:
    from specdiff_dist.api import Prompt

GENERATE, PLAIN, PROMPT_LOOKUP = "generate", "plain", "prompt_lookup"
LLAMA_CPP = "llama_cpp"  # takes part where its file is given
BASELINES = (GENERATE, PLAIN, PROMPT_LOOKUP)  # transformers', ours without a draft, transformers' with prompt lookup


@dataclass(frozen=True, slots=True)
class Task:
    """What all contenders are asked alike. `token_ids` are the prompt's, chat template included."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Rounds:
    """What speculation did on one answer."""

    num_rounds: int
    acceptance_histogram: tuple[int, ...]  # [j] = rounds that kept j accepted draft tokens
    total_tv: float
    records: tuple[RoundRecord, ...] = ()  # empty where they are not told, as over HTTP


@dataclass(frozen=True, slots=True)
class Answer:
    """One contender on one task; seconds from the request to its first tokens (None: not told) and to its last."""

    token_ids: tuple[int, ...]
    seconds: float
    first_s: float | None = None
    num_first: int = 0  # tokens that came first, together
    rounds: Rounds | None = None


Contender = Callable[[Task], Answer]
Answers = dict[str, list[Answer]]  # by contender, in the order of the prompts


def measure(
    sets: Mapping[str, Sequence[Task]],
    contenders: Mapping[str, Contender],
    num_tokens: int,
    *,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Answers]:
    """Answers by set and contender. Each set's first task warms everybody up and is then run again, for the record.

    `progress` is called after each of `num_runs` answers. Raises InvalidConfig when a contender does not give exactly
    `num_tokens` tokens: times would not compare.
    """
    names = list(contenders)
    found: dict[str, Answers] = {}
    turn = 0
    for name, tasks in sets.items():
        answers = found[name] = {contender: [] for contender in names}
        for index, task in enumerate([tasks[0], *tasks]):
            for contender in rotated(names, turn):
                answer = contenders[contender](task)
                if len(answer.token_ids) != num_tokens:
                    raise InvalidConfig(f"{contender} gave {len(answer.token_ids)} tokens instead of {num_tokens}")
                if index:
                    answers[contender].append(answer)
                progress()
            turn += 1
    return found


def num_runs(sets: Mapping[str, Sequence[Task]], num_contenders: int) -> int:
    """How many answers `measure` reports progress on."""
    return sum(len(tasks) + 1 for tasks in sets.values()) * num_contenders


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """`names`, beginning with another one each turn."""
    start = turn % len(names)
    return [*names[start:], *names[:start]]


def tokens_per_s(answers: Sequence[Answer]) -> float:
    return sum(len(answer.token_ids) for answer in answers) / sum(answer.seconds for answer in answers)


def decode_tokens_per_s(answers: Sequence[Answer]) -> float | None:
    """After the first tokens, so without prefill; None where these times are not told."""
    if not answers or any(answer.first_s is None for answer in answers):
        return None
    count = sum(len(answer.token_ids) - answer.num_first for answer in answers)
    seconds = sum(answer.seconds - (answer.first_s or 0.0) for answer in answers)
    return count / seconds if count and seconds > 0.0 else None


def speedup(ours: Sequence[Answer], other: Sequence[Answer]) -> float:
    """Ratio of total times; all answers have the same number of tokens."""
    return sum(answer.seconds for answer in other) / sum(answer.seconds for answer in ours)


def median_speedup(ours: Sequence[Answer], other: Sequence[Answer]) -> float:
    """The median prompt's ratio of times."""
    return median(b.seconds / a.seconds for a, b in zip(ours, other, strict=True))


def baseline_report(answers: Sequence[Answer]) -> dict[str, Any]:
    """The JSON of one baseline on one set."""
    return {"tokens_per_s": tokens_per_s(answers), "decode_tokens_per_s": decode_tokens_per_s(answers)}


def rounds_report(answers: Sequence[Answer]) -> dict[str, Any]:
    """What speculation did on these answers: acceptance, deviation, and medians of a round's parts in milliseconds (of
    all rounds but each answer's first, whose calls carry the prompt)."""
    rounds = [answer.rounds for answer in answers if answer.rounds is not None]
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    num_rounds = sum(one.num_rounds for one in rounds)
    histogram = np.zeros(max((len(one.acceptance_histogram) for one in rounds), default=0), np.int64)
    for one in rounds:
        histogram[: len(one.acceptance_histogram)] += one.acceptance_histogram
    later = [record for one in rounds for record in one.records[1:]]
    split = split_rounds(later) if later else None
    return {
        "acceptance_length": num_tokens / num_rounds if num_rounds else None,
        "acceptance_histogram": histogram.tolist(),
        "mean_tv": sum(one.total_tv for one in rounds) / num_tokens,
        "num_rounds": num_rounds,
        "drafted_per_round": None if split is None else sum(record.num_drafted for record in later) / len(later),
        "draft_ms": None if split is None else split.draft_ms,
        "verify_ms": None if split is None else split.verify_ms,
        "round_ms": None if split is None else split.round_ms,
    }


def drafter_report(answers: Answers, ours: str, *, is_greedy: bool) -> dict[str, Any]:
    """The JSON of contender `ours` on one set, against the baselines among `answers`; null for one that took no part."""
    mine = answers[ours]
    report: dict[str, Any] = {}
    for name in (*BASELINES, LLAMA_CPP):
        report[f"speedup_vs_{name}"] = speedup(mine, answers[name]) if name in answers else None
        report[f"median_speedup_vs_{name}"] = median_speedup(mine, answers[name]) if name in answers else None
    decoding = decode_tokens_per_s(mine), decode_tokens_per_s(answers.get(GENERATE, ()))
    report["decode_speedup_vs_generate"] = decoding[0] / decoding[1] if decoding[0] and decoding[1] else None
    report |= {"tokens_per_s": tokens_per_s(mine), "decode_tokens_per_s": decode_tokens_per_s(mine)}
    return {**report, **rounds_report(mine), "greedy_equal": share_equal(answers, ours) if is_greedy else None}


def share_equal(answers: Answers, ours: str) -> float | None:
    """Share of prompts whose token ids equal those of transformers' `generate`; None without it."""
    if GENERATE not in answers:
        return None
    pairs = zip(answers[ours], answers[GENERATE], strict=True)
    return sum(a.token_ids == b.token_ids for a, b in pairs) / len(answers[ours])


def set_report(answers: Answers, drafters: Mapping[str, str], *, is_greedy: bool) -> dict[str, Any]:
    """The JSON of one set. `drafters`: name -> contender; the first one's numbers stand at the top, too."""
    reports = {name: drafter_report(answers, ours, is_greedy=is_greedy) for name, ours in drafters.items()}
    baselines = {name: baseline_report(answers[name]) for name in (*BASELINES, LLAMA_CPP) if name in answers}
    if is_greedy:
        for name in baselines.keys() - {GENERATE}:
            baselines[name]["greedy_equal"] = share_equal(answers, name)
    return {
        **next(iter(reports.values())),
        "num_prompts": len(next(iter(answers.values()))),
        "baselines": baselines,
        "drafters": reports,
    }
