"""`specdiff train-drafter`: a drafter for a verifier, from nothing but prompts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from specdiff_dist.cli_options import Threads, say, stderr

if TYPE_CHECKING:
    from specdiff_dist.train.data import DataSettings, MadeAnswers


def train_drafter(
    output: Annotated[Path, typer.Option(help="Folder for data, checkpoints and the drafter; resumed if it exists.")],
    verifier: Annotated[str, typer.Option(help="A known name, a local folder or a hub id.")] = "smollm2-135m",
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help='JSON lines with "question", "prompt", "instruction", "turns" or "messages"; several times.'),
    ] = None,
    evaluation_prompts: Annotated[
        list[Path] | None, typer.Option(help="Prompts that must not be trained on; several times.")
    ] = None,
    num_answers: Annotated[int, typer.Option(min=1, help="Answers of the verifier to train on.")] = 10_000,
    data_minutes: Annotated[
        float | None, typer.Option(min=0, help="Stop making answers after about so long.", show_default="no limit")
    ] = None,
    self_written: Annotated[
        float, typer.Option(min=0, max=1, help="Share of answers to prompts the verifier writes itself.")
    ] = 0.25,
    max_new_tokens: Annotated[int, typer.Option(min=16, help="Length of an answer at most.")] = 160,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Answers at once.", show_default="64, on a GPU 512")
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    data_dtype: Annotated[str, typer.Option(help="float32, bfloat16, or auto: bfloat16 on a GPU.")] = "auto",
    device: Annotated[str, typer.Option(help="A torch device, or auto: CUDA where there is one.")] = "auto",
    threads: Threads = None,
    data_only: Annotated[bool, typer.Option("--data-only", help="End when the answers are made.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, the last line of stdout.")] = False,
) -> None:
    """Train a drafter on the verifier's own answers. Interrupted, it goes on where it stopped."""
    from specdiff_dist.train.data import DataSettings

    settings = DataSettings(
        self_written=self_written,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        seed=seed,
        dtype=data_dtype,
        device=device,
    )
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    made = _make_data(
        output / "data", verifier, prompts or [], evaluation_prompts or [], num_answers, settings, data_minutes
    )
    if as_json:
        print(json.dumps({"data": _data_report(made)}))


def _make_data(
    folder: Path,
    verifier: str,
    prompts: list[Path],
    evaluation_prompts: list[Path],
    num_answers: int,
    settings: DataSettings,
    minutes: float | None,
) -> MadeAnswers:
    """The first part: the verifier's answers, with a progress bar."""
    from specdiff_dist.train.data import Progress, make_answers

    bar = ProgressBar(
        TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeElapsedColumn(),
        console=stderr,
    )  # fmt: skip
    with bar:
        task = bar.add_task("answers", total=num_answers, rate="")
        num_tokens, started = 0, 0.0

        def on_tokens(count: int) -> None:
            nonlocal num_tokens, started
            started = started or time.monotonic()
            num_tokens += count
            bar.update(task, rate=f"{num_tokens / max(time.monotonic() - started, 1e-3):.0f} tokens/s")

        made = make_answers(
            verifier,
            prompts,
            evaluation_prompts,
            num_answers,
            folder,
            settings=settings,
            deadline_s=None if minutes is None else 60.0 * minutes,
            progress=Progress(say, lambda count: bar.update(task, completed=count), on_tokens),
        )
    left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(made.left_out.items()))
    say(f"{made.store.num_answers} answers in {made.store.num_shards} shards in {folder}")
    if made.num_tokens:
        say(f"{made.num_tokens} tokens in {made.seconds:.0f} s: {made.num_tokens / made.seconds:.0f} tokens/s")
        say(f"left out: {left_out or 'nothing'}")
    return made


def _data_report(made: MadeAnswers) -> dict[str, object]:
    """The JSON of the data part; keys are part of the command's contract."""
    store = made.store
    return {
        "num_answers": store.num_answers,
        "num_shards": store.num_shards,
        "num_tokens": made.num_tokens,
        "seconds": made.seconds,
        "tokens_per_s": made.num_tokens / made.seconds if made.num_tokens else None,
        "left_out": made.left_out,
        "num_contaminated": sum(file["num_contaminated"] for file in store.meta["prompt_files"]),
        "folder": str(store.folder),
    }
