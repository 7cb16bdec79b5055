"""One shard: the answers of its tasks, and those to the prompts that the verifier writes on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specdiff_dist.core.rows import IntArray
from specdiff_dist.text import Tokenizer
from specdiff_dist.train.answers import Answer
from specdiff_dist.train.contamination import normalised_words
from specdiff_dist.train.filters import answer_fault, prompt_fault
from specdiff_dist.train.generation import BatchWriter
from specdiff_dist.train.jobs import Job, Written
from specdiff_dist.train.plan import Task
from specdiff_dist.train.prompts import Conversation
from specdiff_dist.train.sources import PromptSources, prompt_ids
from specdiff_dist.train.user_turn import UserTurn

SAMPLED_TEMPERATURE = 0.7
SAMPLED_TOP_P = 0.95
PROMPT_TEMPERATURE = 1.0

_ANSWER, _PROMPT, _ANSWER_TO_SELF = 0, 1, 2  # second part of a stream: what its random numbers are for


@dataclass(frozen=True, slots=True)
class _Label:
    task: Task
    is_prompt: bool  # the verifier writes a prompt, not an answer


class ShardWriter:
    """Runs the tasks of shards, one shard after another."""

    def __init__(
        self, writer: BatchWriter, sources: PromptSources, tokenizer: Tokenizer, turn: UserTurn | None, *, longest: int
    ) -> None:
        """`turn`: None when the verifier writes no prompts. `longest`: tokens of a prompt at most."""
        self._writer, self._sources, self._tokenizer, self._turn = writer, sources, tokenizer, turn
        self._longest = longest
        self._known: set[str] = set()  # the prompts the verifier wrote so far, normalised

    def write(
        self, tasks: Sequence[Task], on_answer: Callable[[], None] = lambda: None
    ) -> tuple[list[Answer], Counter[str]]:
        """The answers in the order of their tasks, and what became of the others, counted by reason."""
        found: dict[int, Answer] = {}
        faults: Counter[str] = Counter()

        def then(written: Written) -> Sequence[Job]:
            label = _label(written.job)
            if label.is_prompt:
                job, fault = self._answer_to(written, label.task)
                faults[f"prompt: {fault}"] += fault is not None
                return [] if job is None else [job]
            fault = answer_fault(written.token_ids)
            if fault is None:
                found[label.task.number] = _answer(written, label.task.source)
                on_answer()
            else:
                faults[f"answer: {fault}"] += 1
            return []

        jobs = [self._job(task) for task in tasks]
        # prompts to be written come first, since answers to them follow; then equal lengths together
        jobs.sort(key=lambda job: (not _label(job).is_prompt, -len(job.token_ids)))
        self._writer.write(jobs, then, longest=self._longest)
        return [found[number] for number in sorted(found)], +faults

    def remember(self, prompt: IntArray) -> None:
        """Takes note of a prompt that the verifier wrote in an earlier shard; it will not be answered again."""
        self._known.add(self._words(prompt))

    def _words(self, prompt: IntArray) -> str:
        return " ".join(normalised_words(self._tokenizer.decode(prompt.tolist())))

    def _job(self, task: Task) -> Job:
        if task.source == len(self._sources.names):
            assert self._turn is not None
            opening = np.array(self._turn.opening, np.int32)
            return Job(_Label(task, True), opening, PROMPT_TEMPERATURE, 1.0, (task.number, _PROMPT))
        return _answer_job(task, self._sources.prompts[task.source][task.prompt], _ANSWER)

    def _answer_to(self, written: Written, task: Task) -> tuple[Job | None, str | None]:
        """The job of answering the prompt that was written, or why it is none."""
        words = written.token_ids[: len(written.token_ids) - written.has_ended]
        fault = prompt_fault(words, ended=written.has_ended)
        if fault is not None:
            return None, fault
        text = self._tokenizer.decode(words.tolist(), skip_special_tokens=False).strip()
        if text != self._tokenizer.decode(words.tolist()).strip() or "\ufffd" in text:
            return None, "special"
        if self._sources.evaluation.reason(text) is not None:
            return None, "contaminated"
        prompt = prompt_ids(Conversation(({"role": "user", "content": text},)), self._tokenizer)
        if len(prompt) > self._longest:
            return None, "length"
        known = self._words(prompt)
        if known in self._known:
            return None, "repeated"
        self._known.add(known)
        return _answer_job(task, prompt, _ANSWER_TO_SELF), None


def _label(job: Job) -> _Label:
    assert isinstance(job.label, _Label)
    return job.label


def _answer_job(task: Task, prompt: IntArray, purpose: int) -> Job:
    temperature, top_p = (0.0, 1.0) if task.is_greedy else (SAMPLED_TEMPERATURE, SAMPLED_TOP_P)
    return Job(_Label(task, False), prompt, temperature, top_p, (task.number, purpose))


def _answer(written: Written, source: int) -> Answer:
    prompt = written.job.token_ids
    token_ids = np.concatenate([prompt, written.token_ids]).astype(np.int32)
    return Answer(token_ids, len(prompt), written.top_ids, written.top_log_probs, source)
