"""Which prompts a measurement runs on: known task sets from a data folder, files, or the built-in few."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specdiff_dist.bench.prompts import PROMPTS
from specdiff_dist.errors import InvalidRequest
from specdiff_dist.prompt_files import read_prompt_file

if TYPE_CHECKING:
    from specdiff_dist.api import Prompt

DATA_VARIABLE = "SPECDIFF_DATA"
BUILTIN = "builtin"
KNOWN_SETS = {  # where they lie in a data folder; MT-bench's first turns
    "gsm8k": "gsm8k/test.jsonl",
    "mt_bench": "mt_bench/question.jsonl",
    "humaneval": "humaneval/HumanEval.jsonl",
}


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts that are reported on together."""

    name: str
    prompts: tuple[Prompt, ...]


def read_sets(specs: Sequence[str], data: Path | None, num_prompts: int) -> list[PromptSet]:
    """The sets that `specs` name: "builtin", a known set, or NAME=FILE.jsonl; several may be joined by commas.

    Of a longer set every so-manieth prompt is taken, `num_prompts` in all, so that sets sorted by kind or difficulty are
    covered from end to end. `data`: the folder of the known sets; None: $SPECDIFF_DATA.
    Raises InvalidRequest when a set is unknown, absent, empty or named twice.
    """
    names = [part.strip() for spec in specs for part in spec.split(",") if part.strip()] or [BUILTIN]
    sets = [_read_set(name, data, num_prompts) for name in names]
    for one in sets:
        if sum(other.name == one.name for other in sets) > 1:
            raise InvalidRequest(f"the set {one.name!r} is given twice; give each a name of its own", param="sets")
    return sets


def _read_set(spec: str, data: Path | None, num_prompts: int) -> PromptSet:
    name, is_file, file = spec.partition("=")
    if is_file:
        return _spread(name, read_prompt_file(Path(file)), num_prompts)
    if name == BUILTIN:
        return _spread(name, list(PROMPTS), num_prompts)
    if name not in KNOWN_SETS:
        known = ", ".join([BUILTIN, *KNOWN_SETS])
        raise InvalidRequest(f"unknown set {name!r}; give NAME=FILE.jsonl, or one of {known}", param="sets")
    folder = data or (Path(os.environ[DATA_VARIABLE]) if os.environ.get(DATA_VARIABLE) else None)
    if folder is None or not (folder / KNOWN_SETS[name]).is_file():
        where = "no data folder is given" if folder is None else f"{folder / KNOWN_SETS[name]} is not there"
        raise InvalidRequest(
            f"{where}; give --data FOLDER (or {DATA_VARIABLE}) that holds {KNOWN_SETS[name]}, or --sets {name}=FILE.jsonl",
            param="sets",
        )
    return _spread(name, read_prompt_file(folder / KNOWN_SETS[name]), num_prompts)


def _spread(name: str, prompts: Sequence[Prompt], num_prompts: int) -> PromptSet:
    if not prompts:
        raise InvalidRequest(f"the set {name!r} has no prompts", param="sets")
    count = min(num_prompts, len(prompts))
    return PromptSet(name, tuple(prompts[index * len(prompts) // count] for index in range(count)))
