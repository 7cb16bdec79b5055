"""The training part of `specdiff train-drafter`: its options, progress and report."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from specdiff_dist.cli_options import say, stderr
from specdiff_dist.errors import InvalidConfig

if TYPE_CHECKING:
    from specdiff_dist.train.answers import AnswerStore
    from specdiff_dist.train.run import Made, RunOptions

_REPORT_S = 30.0

Minutes = Annotated[
    float | None, typer.Option(min=0.1, help="Time for everything: half of it for data unless --data-minutes is given.")
]
Steps = Annotated[int | None, typer.Option(min=1, help="Training steps, instead of --minutes.")]
NumLayers = Annotated[int, typer.Option(min=1, help="Layers of the drafter, evenly from the verifier's.")]
Layers = Annotated[str | None, typer.Option(help="Which layers to start from, as 0,10,20,29.", show_default="evenly")]
Initial = Annotated[
    Path | None, typer.Option(help="A drafter folder to go on from instead of the verifier; --layers then are its own.")
]
DraftVocab = Annotated[int, typer.Option(min=0, help="Propose only so many tokens, the most frequent; 0: all.")]
BlockSize = Annotated[int, typer.Option(min=2, help="Block positions in training.")]
LearningRate = Annotated[float, typer.Option(min=0.0, help="At its peak, after the warm-up.")]
AnswersPerBatch = Annotated[int, typer.Option(min=1)]
BlocksPerAnswer = Annotated[int, typer.Option(min=1, help="Blocks after one pass over an answer.")]
Accumulate = Annotated[int, typer.Option(min=1, help="Batches per step.")]
LossShares = Annotated[
    str, typer.Option("--loss", help="Shares of KL, total variation and cross-entropy, as kl=0.7,tv=0,ce=0.3.")
]
Weighting = Annotated[str, typer.Option(help="decay: exp(-position / --decay); length: by expected accepted tokens.")]
Decay = Annotated[float, typer.Option(min=0.01)]
FullyMasked = Annotated[
    float, typer.Option(min=0, max=1, help="Share of blocks with everything after the anchor masked.")
]
Architecture = Annotated[
    str,
    typer.Option(help="causal: the drafter reads the text itself; features: the verifier's hidden states of it."),
]
FeatureLayers = Annotated[
    str | None,
    typer.Option(
        help="Verifier layers whose outputs those are, as 9,19,28.", show_default="those that fed the drafter's layers"
    ),
]
CutPrefix = Annotated[
    bool, typer.Option("--cut-prefix", help="No gradients through the prefix: faster steps, see train.network.")
]
Int8 = Annotated[bool, typer.Option("--int8", help="Export matrices in 8 bits: half the size of bfloat16.")]
Evaluations = Annotated[int, typer.Option(min=1, help="Evaluations over the run.")]
Patience = Annotated[int, typer.Option(min=1, help="Evaluations without improvement before training stops.")]


def parse_layers(text: str | None, option: str = "--layers") -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidConfig(f"{option} takes numbers as 0,10,20,29, not {text!r}") from error


def parse_loss(text: str) -> dict[str, float]:
    """kl=0.7,tv=0,ce=0.3 as LossOptions' shares; one that is not named is 0."""
    names = {"kl": "kl", "tv": "tv", "ce": "cross_entropy"}
    shares = dict.fromkeys(names.values(), 0.0)
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            shares[names[name.strip()]] = float(value)
        except (KeyError, ValueError) as error:
            raise InvalidConfig(f"--loss takes shares as kl=0.7,tv=0,ce=0.3, not {text!r}") from error
    return shares


def train(folder: Path, answers: AnswerStore, verifier: str, options: RunOptions) -> Made:
    """Trains and exports, with a progress bar and a line per evaluation."""
    from specdiff_dist.models import resolve
    from specdiff_dist.train.processes import is_first
    from specdiff_dist.train.run import make_drafter

    bar = ProgressBar(
        TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(), console=stderr, disable=not is_first(),
    )  # fmt: skip
    with bar:
        task = bar.add_task("training", total=None, rate="")
        reported = time.monotonic()

        def on_progress(line: dict[str, Any]) -> None:
            nonlocal reported
            if line["event"] == "step":
                rate = f"loss {line['loss']:.3f}  {line['blocks_per_s']:.0f} blocks/s"
                bar.update(task, completed=line["step"] + 1, total=line["num_steps"], rate=rate)
                now = time.monotonic()
                if not stderr.is_terminal and now - reported >= _REPORT_S:  # a log file shows no bar
                    reported = now
                    say(f"step {line['step'] + 1} of {line['num_steps'] or '?'}, {rate}")
            elif line["event"] == "evaluation":
                say(_evaluation_line(line))
            elif line["event"] == "features":
                bar.update(task, completed=line["done"], total=line["total"], rate="the verifier reads the answers")
                now = time.monotonic()
                if not stderr.is_terminal and (now - reported >= _REPORT_S or line["done"] == line["total"]):
                    reported = now
                    say(f"features of {line['done']} of {line['total']} answers")

        made = make_drafter(
            folder, answers, verifier, resolve(verifier).path, options,
            command=_command(), on_progress=on_progress,
        )  # fmt: skip
    say(f"drafter in {made.folder}: specdiff generate --drafter {made.folder}")
    return made


def training_report(made: Made) -> dict[str, Any]:
    """The JSON of the training part; keys are part of the command's contract."""
    trained = made.trained
    return {
        "folder": str(made.folder),
        "num_steps": trained.num_steps,
        "num_blocks": trained.num_blocks,
        "seconds": round(trained.seconds, 1),
        "stopped_early": trained.stopped_early,
        "before": made.before.as_json(),
        "after": made.after.as_json(),
        "ece_uncalibrated": round(made.ece[0], 4),
        "ece": round(made.ece[1], 4),
    }


def _evaluation_line(line: dict[str, Any]) -> str:
    match = " ".join(f"{value:.2f}" for value in line["match"])
    return (
        f"step {line['step']}: match by position {match}; accepted {line['accepted_greedy']:.2f} greedy, "
        f"{line['accepted_sampled']:.2f} sampled; ECE {line['ece']:.3f}"
    )


def _command() -> str:
    """The command line, for the model card; no folders of this machine but those of the user's own words."""
    return shlex.join(["specdiff", *(Path(part).name if Path(part).is_absolute() else part for part in sys.argv[1:])])
