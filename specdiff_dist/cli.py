"""The `specdiff` command.

Answers and JSON go to stdout; progress, summaries and errors to stderr. Commands import what they need when they run, so
that `specdiff --help` is instant.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.markup import escape
from rich.progress import track

from specdiff_dist.cli_engine import bench_engine
from specdiff_dist.cli_load import bench_load
from specdiff_dist.cli_options import (
    DrafterName,
    Dtype,
    Json,
    Model,
    Threads,
    Tier,
    given,
    loaded_pair,
    quality_of,
    read_prompts,
    say,
    stderr,
)
from specdiff_dist.cli_router import bench_router
from specdiff_dist.cli_simulate import bench_model, simulate
from specdiff_dist.cli_speed import bench_speed
from specdiff_dist.cli_train import train_drafter
from specdiff_dist.cli_wire import bench_wire
from specdiff_dist.config import DEFAULT_TIER
from specdiff_dist.errors import InvalidConfig, SpecdiffError

if TYPE_CHECKING:
    from specdiff_dist.api import Completion, GenerateOptions, Pair, Prompt
    from specdiff_dist.bench import PairSettings, Workload
    from specdiff_dist.models import ModelFolder
    from specdiff_dist.types import RoundRecord

app = typer.Typer(
    name="specdiff",
    help="Speculative diffusion decoding: a diffusion model drafts, an autoregressive model verifies.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Measure the system on this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
app.command()(simulate)
app.command()(train_drafter)
bench_app.command("load")(bench_load)
bench_app.command("model")(bench_model)
bench_app.command("router")(bench_router)
bench_app.command("speed")(bench_speed)
bench_app.command("engine")(bench_engine)
bench_app.command("wire")(bench_wire)


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The user's message; - reads it from stdin.")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help='One JSON object per line, each with "prompt", "question" or "messages".', dir_okay=False),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take only so many lines of --prompt-file.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw/--chat", help="Continue the text as it is, without chat template.")
    ] = False,
    tier: Tier = None,
    quality: Annotated[
        str | None, typer.Option(help="What the HTTP field `quality` takes, as JSON: '{\"effort\": 2}'.")
    ] = None,
    num_denoising_steps: Annotated[int | None, typer.Option(help="Diffusion effort K.", show_default="tier's")] = None,
    speculative_length: Annotated[
        int | None,
        typer.Option("--speculative-length", "--block", help="Tokens to draft; 0 is plain.", show_default="tier's"),
    ] = None,
    leniency: Annotated[float | None, typer.Option(help="0 is exact, larger looser.", show_default="tier's")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", show_default="model's")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 is off.", show_default="model's")] = None,
    top_p: Annotated[float | None, typer.Option(show_default="model's")] = None,
    max_tokens: Annotated[int | None, typer.Option(show_default="to the end of the context")] = None,
    seed: Annotated[int | None, typer.Option(show_default="random")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given several times.")] = None,
    model: Model = "smollm2-135m",
    drafter: DrafterName = "combined",
    dtype: Dtype = "auto",
    threads: Threads = None,
    trace: Annotated[
        Path | None, typer.Option(help="Record the rounds here for `specdiff simulate`: no text, no tokens.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Answer a prompt in this process, streaming the text."""
    prompts = list(read_prompts(prompt, prompt_file, limit))
    options = given(
        tier=tier,
        quality=quality_of(quality, num_denoising_steps, speculative_length, leniency),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        max_tokens=max_tokens,
        seed=seed,
        stop=stop,
        raw=raw or None,
    )
    with loaded_pair(model, drafter, dtype, threads) as pair, _recorded(pair, trace, dtype, prompts, options) as save:
        if as_json:
            for item in track(prompts, "generating", console=stderr, disable=len(prompts) == 1, transient=True):
                print(json.dumps(_report(pair.generate(item, **options))), flush=True)
                save()
            return
        for item in prompts:
            _show(pair, item, options)
            save()


@app.command()
def models(
    names: Annotated[list[str] | None, typer.Argument(help="Known names, folders or hub ids.")] = None,
    as_json: Json = False,
) -> None:
    """Fetch and cache models (default: the embedded verifier), check them, and say where they are."""
    from specdiff_dist.models import EMBEDDED_MODEL, resolve

    found = []
    for name in names or [EMBEDDED_MODEL]:
        with stderr.status(f"preparing {escape(name)}"):
            found.append(resolve(name, progress=say))
    if as_json:
        print(json.dumps({"models": [_model_report(folder) for folder in found]}))
        return
    for report in map(_model_report, found):
        size = f"{report['size_bytes'] / 1e6:.0f} MB"
        print(f"{report['name']}: {report['state']}, context {report['max_model_len']}, {size}, {report['path']}")


@bench_app.command("round")
def bench_round(
    prompt: Annotated[list[str] | None, typer.Option(help="Prompt; may be given several times.")] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests, one at a time.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per request.")] = 64,
    tier: Tier = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", show_default="model's")] = None,
    through: Annotated[str, typer.Option(help="serve: the deployments on this machine; local: one process.")] = "serve",
    model: Model = "smollm2-135m",
    drafter: DrafterName = "combined",
    dtype: Dtype = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Where a round's time goes: draft, verify, router arithmetic, wire, the rest (medians)."""
    from specdiff_dist.bench import PROMPTS, PairSettings, Workload, split_rounds

    texts = prompt or list(PROMPTS)
    texts = [texts[i % len(texts)] for i in range(num_requests)]
    workload = Workload((texts[0], *texts), tier or DEFAULT_TIER, max_tokens, temperature)
    settings = PairSettings(model, None if drafter == "none" else drafter, dtype, threads)
    rounds = []
    for number, records in enumerate(
        track(_rounds(through, workload, settings), "measuring", total=len(workload.prompts), console=stderr)
    ):
        rounds += records if number else ()  # the first request warms up
    split = asdict(split_rounds(rounds))
    if as_json:
        print(json.dumps({**split, "through": through, "num_requests": num_requests}))
        return
    for name, value in split.items():
        print(f"{name:>16} {value:10.3f}")


@bench_app.command("core")
def bench_core(
    num_runs: Annotated[int, typer.Option(min=1, help="Runs per number; a tenth of them on whole rows.")] = 200,
    as_json: Json = False,
) -> None:
    """What one round's decision costs on one thread: sparse and whole rows, every rule, against plain PyTorch."""
    from specdiff_dist.bench.core import measure_core

    with stderr.status("measuring"):
        report = asdict(measure_core(num_runs=num_runs))
    if as_json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        for part, number in value.items() if isinstance(value, dict) else [("", value)]:
            print(f"{name:>21} {part:>14} {number:12.6g}")


def _rounds(through: str, workload: Workload, settings: PairSettings) -> Iterator[tuple[RoundRecord, ...]]:
    if through == "local":
        from specdiff_dist.bench import rounds_in_process

        return rounds_in_process(workload, settings)
    if through == "serve":
        try:
            from deployments.bench_round import rounds_through_serve
        except ImportError as error:
            raise InvalidConfig(f"{error}; run this in the checkout, or use --through local") from error
        return rounds_through_serve(workload, settings)
    raise InvalidConfig(f"--through must be serve or local, not {through!r}")


def main() -> None:
    """Entry point: an error of ours is one line that says what to do, and exit code 2."""
    try:
        app()
    except SpecdiffError as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    stderr.print(f"[red]error:[/] {escape(message)}", soft_wrap=True)
    sys.exit(2)


@contextmanager
def _recorded(
    pair: Pair, path: Path | None, dtype: str, prompts: Sequence[Prompt], options: GenerateOptions
) -> Iterator[Callable[[], None]]:
    """Records everything generated inside; the function given writes what there is so far, as leaving does."""
    if path is None:
        yield lambda: None
        return
    from specdiff_dist.receipts import config_report
    from specdiff_dist.simulate.trace import TraceWriter

    request, config, _ = pair.prepare(prompts[0], **options)
    drafter = None if pair.drafter_info is None else pair.drafter_info.name
    about: dict[str, object] = {
        "drafter": drafter, "verifier": pair.folder.name, "dtype": dtype, "config": config_report(config),
        "temperature": request.sampling.temperature, "top_k": request.sampling.top_k,
    }  # fmt: skip
    with TraceWriter(path, about) as writer, pair.recording() as requests:

        def save() -> None:
            for rounds in requests:
                writer.write(rounds)
            requests.clear()

        try:
            yield save
        finally:
            save()


def _model_report(folder: ModelFolder) -> dict[str, Any]:
    """The JSON of one model that is ready to be loaded."""
    return {
        "name": folder.name,
        "state": "ready",
        "path": str(folder.path),
        "size_bytes": sum(file.stat().st_size for file in folder.path.iterdir() if file.is_file()),
        "max_model_len": folder.max_model_len,
        "eos_token_ids": folder.eos_token_ids,
        "default_sampling": asdict(folder.default_sampling),
        "has_chat_template": folder.has_chat_template,
    }


def _show(pair: Pair, prompt: Prompt, options: GenerateOptions) -> None:
    """Streams one answer to stdout, then its receipt in a line to stderr."""
    receipt = None
    for chunk in pair.stream(prompt, **options):
        print(chunk.text, end="", flush=True)
        receipt = chunk.receipt
    print()
    if receipt is None:
        return
    law = "exact" if receipt.exact else f"mean TV {receipt.mean_tv:.4f}"
    stderr.print(
        f"[dim]{receipt.num_tokens} tokens in {receipt.num_rounds} rounds, "
        f"{receipt.mean_acceptance_length:.2f} a round, tier {receipt.tier}, {law}"
        f"{', degraded' if receipt.degraded else ''}[/]"
    )


def _report(completion: Completion) -> dict[str, Any]:
    """The JSON of one answer; keys are part of the command's contract."""
    from specdiff_dist.receipts import quality_report, speculative_decoding_metrics

    return {
        "text": completion.text,
        "prompt_token_ids": completion.prompt_token_ids,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "usage": completion.usage,
        "metrics": {"speculative_decoding": speculative_decoding_metrics(completion.receipt)},
        "quality": quality_report(completion.receipt),
    }


if __name__ == "__main__":
    main()
