"""`specdiff train-drafter`: a drafter for a verifier, from nothing but prompts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from specdiff_dist import cli_training as training
from specdiff_dist.cli_options import Threads, say, stderr
from specdiff_dist.errors import InvalidConfig

if TYPE_CHECKING:
    from specdiff_dist.train.data import DataSettings, MadeAnswers


_REPORT_S = 30.0


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
    shard_size: Annotated[int, typer.Option(min=1, help="Answers that are written to disk together.")] = 128,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    data_dtype: Annotated[str, typer.Option(help="float32, bfloat16, or auto: bfloat16 on a GPU.")] = "auto",
    device: Annotated[str, typer.Option(help="A torch device, or auto: CUDA where there is one.")] = "auto",
    threads: Threads = None,
    minutes: training.Minutes = None,
    steps: training.Steps = None,
    num_layers: training.NumLayers = 4,
    layers: training.Layers = None,
    initial: training.Initial = None,
    draft_vocab: training.DraftVocab = 8192,
    block_size: training.BlockSize = 8,
    learning_rate: training.LearningRate = 5e-4,
    answers_per_batch: training.AnswersPerBatch = 4,
    blocks_per_answer: training.BlocksPerAnswer = 32,
    accumulate: training.Accumulate = 1,
    loss: training.LossShares = "kl=0.7,ce=0.3",
    weighting: training.Weighting = "decay",
    decay: training.Decay = 4.0,
    fully_masked: training.FullyMasked = 0.5,
    cut_prefix: training.CutPrefix = False,
    evaluations: training.Evaluations = 8,
    patience: training.Patience = 4,
    data_only: Annotated[bool, typer.Option("--data-only", help="End when the answers are made.")] = False,
    train_only: Annotated[
        bool, typer.Option("--train-only", help="Train on the answers that are there already.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, the last line of stdout.")] = False,
) -> None:
    """Train a drafter on the verifier's own answers. Interrupted, it goes on where it stopped."""
    from specdiff_dist.train import processes
    from specdiff_dist.train.answers import AnswerStore
    from specdiff_dist.train.batches import BatchOptions
    from specdiff_dist.train.data import DataSettings
    from specdiff_dist.train.losses import LossOptions
    from specdiff_dist.train.run import NetworkOptions, RunOptions
    from specdiff_dist.train.trainer import TrainOptions

    started = time.monotonic()
    if minutes is not None and steps is not None:
        raise InvalidConfig("give either --minutes or --steps")
    if data_only and train_only:
        raise InvalidConfig("--data-only and --train-only leave nothing to do")
    settings = DataSettings(
        self_written=self_written, max_new_tokens=max_new_tokens, batch_size=batch_size, shard_size=shard_size, seed=seed,
        dtype=data_dtype, device=device,
    )  # fmt: skip
    losses = LossOptions(**training.parse_loss(loss), weighting=weighting, decay=decay)
    network = NetworkOptions(num_layers, training.parse_layers(layers), initial, draft_vocab, not cut_prefix)
    batches = BatchOptions(answers_per_batch, blocks_per_answer, block_size, fully_masked=fully_masked, seed=seed)
    report: dict[str, object] = {}
    with processes.joined(device, threads) as own_device:
        has_begun = (output / "checkpoints" / "checkpoint.safetensors").exists()  # then the data must not change
        if processes.is_first() and not (train_only or (has_begun and not data_only)):
            if data_minutes is None and minutes is not None and not data_only:
                data_minutes = minutes / 2
            made = _make_data(
                output / "data", verifier, prompts or [], evaluation_prompts or [], num_answers, settings, data_minutes
            )
            report["data"] = _data_report(made)
        processes.wait_for_all()
        if not data_only:
            length = {"num_steps": steps or 2000}
            if minutes is not None:  # what is left, but for loading, calibration and export
                length = {"minutes": max(0.9 * (minutes - (time.monotonic() - started) / 60), 0.1)}
            lengths: Any = length
            options = RunOptions(
                TrainOptions(
                    **lengths, learning_rate=learning_rate, accumulate=accumulate, num_evaluations=evaluations,
                    patience=patience, loss=losses,
                ),
                network, batches, own_device,
            )  # fmt: skip
            drafter = training.train(output, AnswerStore.open(output / "data"), verifier, options)
            report["training"] = training.training_report(drafter)
        is_first = processes.is_first()
    if as_json and is_first:
        print(json.dumps(report))


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
        num_tokens = 0
        started = reported = time.monotonic()

        def on_tokens(count: int) -> None:
            nonlocal num_tokens, started, reported
            now = time.monotonic()
            if num_tokens == 0:
                started = reported = now
            num_tokens += count
            rate = f"{num_tokens / max(now - started, 1e-3):.0f} tokens/s"
            bar.update(task, rate=rate)
            if not stderr.is_terminal and now - reported >= _REPORT_S:  # a log file shows no bar
                reported = now
                say(f"{bar.tasks[task].completed:.0f} of {num_answers} answers, {rate}")

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
