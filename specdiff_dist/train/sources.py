"""The prompts that answers are made for, ready for the model and checked against the evaluation sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdiff_dist.core.rows import IntArray
from specdiff_dist.errors import InvalidConfig
from specdiff_dist.text import Tokenizer
from specdiff_dist.train.contamination import SHINGLE_WORDS, EvaluationTexts
from specdiff_dist.train.prompts import Conversation, PromptFile, read_prompt_file

SELF = "self"


@dataclass(frozen=True, slots=True)
class PromptSources:
    """Files in the order given; the verifier itself comes last."""

    names: tuple[str, ...]  # of the files
    prompts: tuple[tuple[IntArray, ...], ...]  # per file: token ids with chat template, int32
    evaluation: EvaluationTexts
    report: dict[str, Any]  # for meta.json: files, hashes, what was left out and why

    @property
    def summary(self) -> list[str]:
        """What the contamination check found, in sentences."""
        if not self.report["evaluation_files"]:
            return ["no evaluation sets given: nothing was checked for contamination"]
        kept = sum(file["num_used"] for file in self.report["prompt_files"])
        lines = []
        for file in self.report["prompt_files"]:
            numbers = [drop["prompt"] for drop in file["contaminated"]]
            if numbers:
                shown = ", ".join(map(str, numbers[:8])) + (" …" if len(numbers) > 8 else "")
                lines.append(
                    f"{len(numbers)} of {file['num_prompts']} prompts in {file['name']} occur in the evaluation sets or share "
                    f"{SHINGLE_WORDS} words in a row with one; left out: {shown}"
                )
        return [*lines, f"0 of {kept} training prompts occur in the evaluation sets"]


def read_sources(
    prompt_files: Sequence[Path],
    evaluation_files: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int,
) -> PromptSources:
    """Reads all files. Prompts that are repeated, longer than `max_prompt_tokens` or known from an evaluation file are
    left out. Raises InvalidRequest, InvalidConfig."""
    evaluations = [read_prompt_file(path) for path in evaluation_files]
    evaluation = EvaluationTexts(text for file in evaluations for prompt in file.prompts for text in prompt.user_texts)
    seen: set[bytes] = set()
    files = [read_prompt_file(path) for path in prompt_files]
    names = [file.name for file in files]
    if len(set(names)) < len(names):
        names = [f"{path.parent.name}/{path.name}" for path in prompt_files]
    kept, reports = [], []
    for name, file in zip(names, files, strict=True):
        prompts, report = _usable(file, tokenizer, evaluation, seen, max_prompt_tokens)
        if not prompts:
            raise InvalidConfig(f"no prompt of {file.name} can be used: {report}; leave the file out")
        kept.append(prompts)
        reports.append({"name": name, "sha256": file.sha256, "num_prompts": len(file.prompts), **report})
    about = [{"name": file.name, "sha256": file.sha256, "num_prompts": len(file.prompts)} for file in evaluations]
    return PromptSources(tuple(names), tuple(kept), evaluation, {"prompt_files": reports, "evaluation_files": about})


def _usable(
    file: PromptFile, tokenizer: Tokenizer, evaluation: EvaluationTexts, seen: set[bytes], max_prompt_tokens: int
) -> tuple[tuple[IntArray, ...], dict[str, Any]]:
    kept: list[IntArray] = []
    contaminated: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    for number, prompt in enumerate(file.prompts):
        reasons = {evaluation.reason(text) for text in prompt.user_texts} - {None}
        if reasons:
            contaminated.append({"prompt": number, "reason": "exact" if "exact" in reasons else "shingle"})
            continue
        token_ids = prompt_ids(prompt, tokenizer)
        key = token_ids.tobytes()
        if len(token_ids) > max_prompt_tokens:
            counts["too_long"] += 1
        elif key in seen:
            counts["repeated"] += 1
        else:
            seen.add(key)
            kept.append(token_ids)
    return tuple(kept), {
        "num_used": len(kept),
        "num_too_long": counts["too_long"],
        "num_repeated": counts["repeated"],
        "num_contaminated": len(contaminated),
        "contaminated": contaminated,
    }


def prompt_ids(prompt: Conversation, tokenizer: Tokenizer) -> IntArray:
    """Token ids of a prompt, int32; without a chat template the user's text alone."""
    if tokenizer.has_chat_template:
        return np.array(tokenizer.apply_chat_template(prompt.messages), np.int32)
    return np.array(tokenizer.encode(prompt.messages[-1]["content"], add_special_tokens=True), np.int32)
