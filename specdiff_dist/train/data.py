"""The data of a drafter: a verifier's own answers, made shard by shard, resumable at any moment."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import filelock
import torch

from specdiff_dist.errors import InvalidConfig
from specdiff_dist.models import ModelFolder, resolve
from specdiff_dist.text import Tokenizer
from specdiff_dist.train import filters, shard_writer
from specdiff_dist.train.answers import META, AnswerStore, read_meta, shard_path, write_meta, write_shard
from specdiff_dist.train.generation import BatchWriter
from specdiff_dist.train.plan import Source, plan, shares
from specdiff_dist.train.shard_writer import ShardWriter
from specdiff_dist.train.sources import SELF, PromptSources, read_sources
from specdiff_dist.train.user_turn import UserTurn
from specdiff_dist.train.verifier_model import load_model
from specdiff_dist.verifiers.device import DTYPES, pick_device
from specdiff_dist.verifiers.folder import vocab_size


@dataclass(frozen=True, slots=True)
class DataSettings:
    """How answers are made; part of meta.json, so that a folder keeps to one of them."""

    self_written: float = 0.25  # share of answers to prompts that the verifier writes itself
    max_new_tokens: int = 160
    max_prompt_tokens: int = 384
    shard_size: int = 128  # tasks; some answers are left out
    batch_size: int | None = None  # rows at once; None: 64 on a CPU, 512 on a GPU
    seed: int = 0
    dtype: str = "auto"  # float32, bfloat16 or auto: bfloat16 on a GPU
    device: str = "auto"

    def __post_init__(self) -> None:
        if not 0.0 <= self.self_written <= 1.0:
            raise InvalidConfig(f"the share of self-written prompts must be from 0 to 1, not {self.self_written}")
        for name in ("max_new_tokens", "max_prompt_tokens", "shard_size", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidConfig(f"{name} must be at least 1, not {value}")
        if self.seed < 0:
            raise InvalidConfig(f"the seed must not be negative: {self.seed}")
        if self.dtype not in ("auto", *DTYPES):
            raise InvalidConfig(f"dtype must be auto, {' or '.join(DTYPES)}, not {self.dtype!r}")


@dataclass(slots=True)
class Progress:
    """Told while answers are made; a caller overrides what it shows."""

    say: Callable[[str], None] = lambda message: None
    on_answers: Callable[[int], None] = lambda num_answers: None  # all answers there are
    on_tokens: Callable[[int], None] = lambda num_tokens: None  # written by the verifier just now


@dataclass(frozen=True, slots=True)
class MadeAnswers:
    """What `make_answers` did."""

    store: AnswerStore
    num_tokens: int  # written in this run, prompts and what was left out included
    seconds: float  # spent writing them
    left_out: dict[str, int] = field(default_factory=dict)  # in this run, by reason


def make_answers(
    verifier: str,
    prompt_files: Sequence[Path],
    evaluation_files: Sequence[Path],
    num_answers: int,
    folder: Path,
    *,
    settings: DataSettings | None = None,
    deadline_s: float | None = None,
    progress: Progress | None = None,
) -> MadeAnswers:
    """Makes whole shards until `folder` holds `num_answers` answers, or until the next one would end after `deadline_s`
    seconds from now (one is always made). Shards that are there are kept; the rest is as if there had been no interruption.

    Raises InvalidConfig (settings that differ from the folder's, or another run at work in it), InvalidRequest (a prompt
    file), ModelUnavailable.
    """
    started = time.monotonic()
    settings, progress = settings or DataSettings(), progress or Progress()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(folder / ".lock", timeout=0):
            return _make(
                resolve(verifier, progress=progress.say), prompt_files, evaluation_files, num_answers, folder, settings,
                None if deadline_s is None else started + deadline_s, progress,
            )  # fmt: skip
    except filelock.Timeout as error:
        raise InvalidConfig(f"another run is writing to {folder}; wait for it or choose another folder") from error


def _make(
    model_folder: ModelFolder,
    prompt_files: Sequence[Path],
    evaluation_files: Sequence[Path],
    num_answers: int,
    folder: Path,
    settings: DataSettings,
    deadline: float | None,
    progress: Progress,
) -> MadeAnswers:
    tokenizer = Tokenizer.load(model_folder.path)
    longest = min(settings.max_prompt_tokens, model_folder.max_model_len - settings.max_new_tokens)
    if longest < 1:
        raise InvalidConfig(f"max_new_tokens {settings.max_new_tokens} leaves no room in {model_folder.max_model_len}")
    sources = read_sources(prompt_files, evaluation_files, tokenizer, max_prompt_tokens=longest)
    for line in sources.summary:
        progress.say(line)
    device = pick_device(settings.device)
    share = shares([len(prompts) for prompts in sources.prompts], settings.self_written)
    turn = UserTurn.of(tokenizer) if share[-1] > 0 else None
    meta = _meta(model_folder, settings, sources, share, device)
    _claim(folder, meta)
    store = AnswerStore.open(folder)
    progress.on_answers(store.num_answers)
    if store.num_answers >= num_answers:
        return MadeAnswers(store, 0, 0.0)

    num_tokens = 0

    def on_step(count: int) -> None:
        nonlocal num_tokens
        num_tokens += count
        progress.on_tokens(count)

    writer = BatchWriter(
        load_model(
            model_folder,
            dtype=meta["dtype"],
            device=device,
            num_rows=meta["batch_size"],
            longest=longest + settings.max_new_tokens,
        ),
        vocab_size=vocab_size(model_folder.path),
        stop_ids=sorted({*model_folder.eos_token_ids, *(() if turn is None else (turn.end_token_id,))}),
        max_new_tokens=settings.max_new_tokens,
        batch_size=meta["batch_size"],
        seed=settings.seed,
        on_step=on_step,
    )
    shard = ShardWriter(writer, sources, tokenizer, turn, longest=longest)
    for prompt in store.prompts(len(sources.names)):
        shard.remember(prompt)
    all_sources = [Source(s, None if i == len(share) - 1 else len(sources.prompts[i])) for i, s in enumerate(share)]
    tasks = plan(all_sources, settings.seed)
    list(islice(tasks, store.num_shards * settings.shard_size))
    started, left_out, num_made, number = time.monotonic(), Counter[str](), store.num_answers, store.num_shards
    longest_s = 0.0
    while num_made < num_answers:
        began = time.monotonic()
        if deadline is not None and number > store.num_shards and began + longest_s > deadline:
            break
        batch = list(islice(tasks, settings.shard_size))
        if not batch:
            progress.say(f"every prompt is used up after {num_made} answers; add prompt files or --self-written")
            break
        counter = iter(range(num_made + 1, num_made + 1 + len(batch)))
        answers, faults = shard.write(batch, lambda counter=counter: progress.on_answers(next(counter)))
        write_shard(folder, number, answers)
        num_made += len(answers)
        number += 1
        left_out += faults
        longest_s = max(longest_s, time.monotonic() - began)
    return MadeAnswers(AnswerStore.open(folder), num_tokens, time.monotonic() - started, dict(left_out))


def _meta(
    model_folder: ModelFolder, settings: DataSettings, sources: PromptSources, share: list[float], device: torch.device
) -> dict[str, Any]:
    """Everything that decides what the shards hold, and what was found out about the files."""
    on_gpu = device.type != "cpu"
    dtype = settings.dtype if settings.dtype != "auto" else "bfloat16" if on_gpu else "float32"
    return {
        "format": 1,
        "verifier": model_folder.name,
        "device": device.type,
        "dtype": dtype,
        "seed": settings.seed,
        "shard_size": settings.shard_size,
        "batch_size": settings.batch_size or (512 if on_gpu else 64),
        "max_new_tokens": settings.max_new_tokens,
        "max_prompt_tokens": settings.max_prompt_tokens,
        "sampling": {
            "greedy": 0.5,
            "sampled": 0.5,
            "temperature": shard_writer.SAMPLED_TEMPERATURE,
            "top_p": shard_writer.SAMPLED_TOP_P,
            "prompt_temperature": shard_writer.PROMPT_TEMPERATURE,
        },
        "filters": {name.lower(): getattr(filters, name) for name in dir(filters) if name.startswith(("MIN_", "MAX_"))},
        "sources": [*sources.names, SELF],
        "shares": share,
        **sources.report,
    }


def _claim(folder: Path, meta: dict[str, Any]) -> None:
    """Writes meta.json, or finds the one that is there equal. Removes what a killed run left half written."""
    for path in folder.glob("*.tmp"):
        path.unlink()
    known = read_meta(folder)
    if known is None:
        if shard_path(folder, 0).exists():
            raise InvalidConfig(f"{folder} has shards but no {META}; choose another folder")
        write_meta(folder, meta)
        return
    differing = sorted(key for key in known.keys() | meta.keys() if known.get(key) != meta.get(key))
    if differing:
        raise InvalidConfig(
            f"{folder} holds answers made with another {', '.join(differing)}; use the same settings and files to continue "
            "them, or another folder"
        )
