"""`specdiff bench load`: what many clients at once get, with speculation and without."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from specdiff_dist.cli_options import (
    DrafterName,
    Dtype,
    Json,
    Model,
    NumPrompts,
    Sets,
    SetsFolder,
    Threads,
    Tier,
    given,
    quality_of,
    say,
    stderr,
)
from specdiff_dist.config import DEFAULT_TIER
from specdiff_dist.errors import InvalidConfig, InvalidRequest

if TYPE_CHECKING:
    from deployments.bench_load import LoadPlan
    from deployments.settings import AppSettings

NumberT = TypeVar("NumberT", int, float)

COLUMNS = {
    "tokens_per_s": "tokens/s", "plain_tokens_per_s": "plain", "ratio": "ratio", "p50_itl_ms": "p50 ITL ms",
    "p99_itl_ms": "p99 ITL ms", "p50_ttft_ms": "p50 TTFT ms", "p99_ttft_ms": "p99 TTFT ms", "retried": "retried",
    "lost": "lost", "different": "different",
}  # fmt: skip


def bench_load(
    concurrency: Annotated[str, typer.Option(help="Closed loops of so many clients, by commas.")] = "1,2,4,8,16,32,64",
    rate: Annotated[str, typer.Option(help="Poisson arrivals, requests per second, by commas.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Of every point, on and off in turns.")] = 3,
    requests_per_client: Annotated[int, typer.Option(min=1, help="In a closed loop.")] = 2,
    min_requests: Annotated[int, typer.Option(min=1, help="Of a closed loop, however few its clients.")] = 8,
    num_arrivals: Annotated[int, typer.Option(min=1, help="Requests at each --rate.")] = 32,
    sets: Sets = None,
    data: SetsFolder = None,
    num_prompts: NumPrompts = 32,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per answer, whatever EOS says.")] = 64,
    tier: Tier = None,
    quality: Annotated[
        str | None, typer.Option(help="What the HTTP field `quality` takes, as JSON: '{\"draft_top_k\": 16}'.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy: answers are compared, too.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 0,
    model: Model = "smollm2-135m",
    drafter: DrafterName = "combined",
    dtype: Dtype = "auto",
    threads: Threads = None,
    setting: Annotated[
        list[str] | None, typer.Option(help="Of the deployments, NAME=VALUE: max_sessions=64; several times.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Tokens/s and ratio over concurrency, as PNG.")] = None,
    overlap_picture: Annotated[
        Path | None,
        typer.Option(help="Measure instead how drafter and verifier overlap at one --concurrency; draw it, as PNG."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Tokens/s, latencies and losses through HTTP, the tier as it comes against the same server with speculation off."""
    concurrencies, rates = _numbers(concurrency, int, "--concurrency"), _numbers(rate, float, "--rate")
    if overlap_picture is not None and (len(concurrencies) != 1 or rates or picture is not None):
        raise InvalidConfig("--overlap-picture goes with one --concurrency, and without --rate and --picture")
    asked = quality_of(quality, None, None, None) or {}
    if tier is not None and asked.setdefault("tier", tier) != tier:
        raise InvalidRequest("the tier is given twice: --tier and in --quality; drop one", param="quality")
    on = {"tier": DEFAULT_TIER, **asked}
    settings = _settings(setting or [], given(model=model, drafter=drafter, dtype=dtype), threads)
    plan = _plan(
        settings, sets or [], data, num_prompts, {"max_tokens": max_tokens, "temperature": temperature}, on,
        given(repeats=repeats, requests_per_client=requests_per_client, min_requests=min_requests),
    )  # fmt: skip
    report: dict[str, Any] = {"setting": _setting(settings, plan, on)}
    if overlap_picture is not None:
        report |= _overlap(settings, plan, concurrencies[0], overlap_picture)
    else:
        report |= _points(settings, plan, concurrencies, rates, num_arrivals, seed, picture)
    if as_json:
        print(json.dumps(report))
    else:
        _print(report)


def _numbers(text: str, kind: type[NumberT], option: str) -> list[NumberT]:
    """Positive numbers, by commas. Raises InvalidConfig."""
    try:
        numbers = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = [kind(0)]
    if not all(number > 0 for number in numbers):
        raise InvalidConfig(f"{option} takes positive numbers by commas, not {text!r}")
    return numbers


def _settings(assignments: Sequence[str], options: Mapping[str, Any], threads: int | None) -> AppSettings:
    """Raises InvalidConfig for a setting that there is not, or a value it does not take."""
    try:
        from deployments.settings import AppSettings
    except ImportError as error:
        raise InvalidConfig(f"{error}; run this in the checkout") from error
    # The prompts come again in every run: whoever runs second would find them read.
    values = {"shared_prefix_tokens": 0, **options}
    if threads is not None:
        values |= {"verifier_num_threads": threads, "drafter_num_threads": threads}
    for assignment in assignments:
        name, is_assignment, value = assignment.partition("=")
        if not is_assignment:
            raise InvalidConfig(f"--setting takes NAME=VALUE, not {assignment!r}")
        values[name] = value
    try:
        return AppSettings.model_validate(values)
    except ValueError as error:  # pydantic's
        raise InvalidConfig(f"--setting: {error}") from error


def _plan(
    settings: AppSettings,
    sets: Sequence[str],
    data: Path | None,
    num_prompts: int,
    options: Mapping[str, Any],
    quality: Mapping[str, Any],
    counts: Mapping[str, int],
) -> LoadPlan:
    from deployments.bench_load import LoadPlan
    from specdiff_dist.api import tokenize
    from specdiff_dist.bench.load import OFF, ON
    from specdiff_dist.bench.prompt_sets import read_sets
    from specdiff_dist.models import resolve
    from specdiff_dist.text import Tokenizer

    folder = resolve(settings.model, progress=say)
    tokenizer = Tokenizer.load(folder.path)
    prompts = [tokenize(tokenizer, prompt) for one in read_sets(sets, data, num_prompts) for prompt in one.prompts]
    for prompt in prompts:
        if len(prompt) + options["max_tokens"] > folder.max_model_len:
            raise InvalidRequest(
                f"a prompt of {len(prompt)} tokens and --max-tokens do not fit into the context of {folder.max_model_len}"
            )
    return LoadPlan(prompts, options, {ON: quality, OFF: {**quality, "speculation": "off"}}, **counts)


def _points(
    settings: AppSettings,
    plan: LoadPlan,
    concurrencies: Sequence[int],
    rates: Sequence[float],
    num_arrivals: int,
    seed: int,
    picture: Path | None,
) -> dict[str, Any]:
    """`points` of the closed loops, `poisson` of the arrivals."""
    from deployments.bench_load import measure_points
    from specdiff_dist.bench.load_report import point_report

    with stderr.status("starting") as status:
        points = measure_points(
            settings, plan, concurrencies, rates, num_arrivals=num_arrivals, seed=seed, progress=status.update
        )
    is_greedy = plan.options["temperature"] == 0.0
    reports = [point_report(point, is_greedy=is_greedy) for point in points]
    report = {
        "points": [each for each in reports if "concurrency" in each],
        "poisson": [each for each in reports if "rate" in each],
    }
    if picture is not None:
        from specdiff_dist.pictures_load import draw_load

        draw_load(picture, report["points"])
    return report


def _overlap(settings: AppSettings, plan: LoadPlan, concurrency: int, picture: Path) -> dict[str, Any]:
    from deployments.bench_load import measure_overlap
    from specdiff_dist.bench.load_report import overlap_report
    from specdiff_dist.pictures_load import draw_overlap

    with stderr.status("measuring"):
        run, intervals = measure_overlap(settings, plan, concurrency)
    report = overlap_report(intervals, run)
    draw_overlap(picture, intervals, run, report["overlap"])
    return {"concurrency": concurrency, "lost": sum(not answer.is_whole for answer in run.answers), **report}


def _setting(settings: AppSettings, plan: LoadPlan, quality: Mapping[str, Any]) -> dict[str, Any]:
    """Everything a number depends on."""
    names = (
        "model", "drafter", "dtype", "drafter_dtype", "verifier_num_threads", "drafter_num_threads", "verifier_replicas",
        "drafter_replicas", "transport", "max_sessions", "max_ongoing_requests", "shared_prefix_tokens",
    )  # fmt: skip
    return {
        **{name: getattr(settings, name) for name in names},
        **plan.options, "quality": dict(quality), "num_prompts": len(plan.prompts), "num_cores": os.cpu_count(),
        "machine": f"{platform.machine()} {platform.system()}", "python": platform.python_version(),
    }  # fmt: skip


def _print(report: Mapping[str, Any]) -> None:
    """A table for a person; --json has the rest."""
    if "overlap" in report:
        for name in ("drafter_busy_s", "verifier_busy_s", "wall_s", "overlap"):
            print(f"{name:>16} {report[name]:8.2f}")
        return
    table = Table(box=None)
    for title in ("load", *COLUMNS.values()):
        table.add_column(title, justify="right")
    for point in (*report["points"], *report["poisson"]):
        load = f"{point['concurrency']} clients" if "concurrency" in point else f"{point['rate']:g}/s"
        table.add_row(load, *("" if point[name] is None else f"{point[name]:.3g}" for name in COLUMNS))
    Console(width=max(120, Console().width)).print(table)
