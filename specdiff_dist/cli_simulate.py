"""`specdiff simulate` and `specdiff bench model`: what would be, and whether predictions hold."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress

from specdiff_dist.cli_options import (
    DrafterName,
    Dtype,
    Json,
    Model,
    Threads,
    loaded_pair,
    read_prompts,
    stderr,
)  # fmt: skip
from specdiff_dist.errors import InvalidConfig

if TYPE_CHECKING:
    from specdiff_dist.core.throughput import LineFit
    from specdiff_dist.simulate.comparison import Comparison
    from specdiff_dist.simulate.costs import Costs
    from specdiff_dist.simulate.trace import RoundTrace

Pictures = Annotated[Path | None, typer.Option("--picture", help="Draw it here, as PNG.")]


def simulate(
    trace: Annotated[Path | None, typer.Option(help="Recorded rounds: `specdiff generate --trace`.")] = None,
    policy: Annotated[str, typer.Option(help='all, or a policy: name or name:{"field": value}.')] = "all",
    leniency: Annotated[float, typer.Option(min=0, max=1, help="λ of the linear rule in the replay.")] = 0.0,
    block: Annotated[int, typer.Option(min=1, help="Tokens a draft call gives, for --policy all.")] = 4,
    draft_cost: Annotated[
        str | None, typer.Option(help="Seconds of a draft call: base,per-token.", show_default="the trace's")
    ] = None,
    verify_cost: Annotated[
        str | None, typer.Option(help="Seconds of a verify call: base,per-token.", show_default="the trace's")
    ] = None,
    costs_from: Annotated[
        Path | None, typer.Option(help="Another trace to tell costs from.", show_default="--trace")
    ] = None,
    picture: Pictures = None,
    cluster: Annotated[bool, typer.Option("--cluster", help="Simulate a cluster under load instead.")] = False,
    sessions: Annotated[int, typer.Option(min=1, help="With --cluster.")] = 10_000,
    tokens: Annotated[int, typer.Option(min=1, help="Per session.")] = 128,
    drafters: Annotated[int, typer.Option(min=1)] = 64,
    verifiers: Annotated[int, typer.Option(min=1)] = 32,
    routers: Annotated[int, typer.Option(min=1)] = 8,
    arrivals_per_s: Annotated[float | None, typer.Option(min=0.001, show_default="all at once")] = None,
    max_sessions: Annotated[int, typer.Option(min=1, help="Per verifier; more wait.")] = 1_000_000,
    max_batch: Annotated[int, typer.Option(min=1, help="Sessions that share a forward.")] = 64,
    wire_ms: Annotated[float, typer.Option(min=0, help="One way; a trace's costs include it.")] = 0.0,
    length: Annotated[int, typer.Option(min=1, help="Without a trace: tokens verified per round.")] = 4,
    acceptance: Annotated[float, typer.Option(min=0, max=1, help="Without a trace: per position.")] = 0.7,
    seed: int = 0,
    as_json: Json = False,
) -> None:
    """Replay recorded rounds under other speculation policies, or plan a cluster. Needs no model."""
    from specdiff_dist.simulate.trace import read_trace

    requests = read_trace(trace)[1] if trace is not None else None
    costs = _costs(requests, draft_cost, verify_cost, costs_from, needed=not cluster or requests is not None)
    if not cluster:
        if requests is None or costs is None:
            raise InvalidConfig("give --trace FILE (`specdiff generate … --trace FILE` records one), or --cluster")
        report = _replayed(requests, costs, policy, leniency, block, picture)
    else:
        from specdiff_dist.simulate import planning
        from specdiff_dist.simulate.cluster import Cluster, Load
        from specdiff_dist.simulate.cluster import simulate as run
        from specdiff_dist.simulate.costs import router_s

        known: dict[str, Any] = {}
        if costs is not None:
            known = {"draft": planning.batch_cost(costs.draft), "verify": planning.batch_cost(costs.verify)}
        if requests is not None:
            known["router_s"] = router_s(requests)
        plan = Cluster(
            routers, drafters, verifiers, wire_s=wire_ms / 1e3, max_batch=max_batch, max_sessions=max_sessions, **known
        )
        assumed = planning.assumed_rounds(length, acceptance)
        rounds = assumed if requests is None else planning.recorded_rounds(requests)
        started = time.perf_counter()
        outcome = run(plan, Load(sessions, tokens, rounds, arrivals_per_s), seed=seed)
        report = {
            "rounds_per_s": outcome.rounds_per_s,
            "tokens_per_s": outcome.tokens_per_s,
            "p50_latency_s": outcome.latency_s(0.5),
            "p99_latency_s": outcome.latency_s(0.99),
            "makespan_s": outcome.makespan_s,
            "drafter_busy": outcome.drafter_busy,
            "verifier_busy": outcome.verifier_busy,
            "num_rounds": outcome.num_rounds,
            "seconds": time.perf_counter() - started,
        }
        if requests is not None:
            report["recorded_rounds_per_s"] = planning.recorded_rounds_per_s(requests)
    _print(report, as_json)


def bench_model(
    prompt: Annotated[list[str] | None, typer.Option(help="Prompt; may be given several times.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="JSON lines with prompts, as for `generate`.", dir_okay=False)
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Take only so many lines of --prompt-file.")] = 4,
    block: Annotated[int, typer.Option(min=1, help="Tokens to draft in a round.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per request.")] = 48,
    seed: int = 0,
    model: Model = "smollm2-135m",
    drafter: DrafterName = "diffusion",
    dtype: Dtype = "auto",
    threads: Threads = None,
    picture: Pictures = None,
    as_json: Json = False,
) -> None:
    """The throughput model against measurement, over diffusion efforts and leniencies, in this process."""
    from specdiff_dist.bench.model import Settings, measure_model, num_requests
    from specdiff_dist.bench.prompts import PROMPTS

    prompts = [*(prompt or ()), *(read_prompts(None, prompt_file, limit) if prompt_file else ())] or list(PROMPTS)
    settings = Settings(block=block, max_tokens=max_tokens, seed=seed)
    with loaded_pair(model, drafter, dtype, threads) as pair, Progress(console=stderr, transient=True) as bar:
        if pair.drafter is None:
            raise InvalidConfig("the throughput model is about drafting; give a drafter")
        task = bar.add_task("measuring", total=num_requests(len(prompts), settings))
        bench = measure_model(pair, prompts, settings, progress=lambda: bar.advance(task))
    if picture is not None:
        from specdiff_dist.pictures import draw_throughput

        draw_throughput(picture, bench)
    report = {
        "median_relative_error": bench.median_relative_error,
        "d_k": bench.model.mean_distance,
        "cost_fit": {
            "draft_base_s": bench.model.draft_cost.intercept,
            "draft_per_step_s": bench.model.draft_cost.slope,
            "verify_base_s": bench.model.verify_cost.intercept,
            "verify_per_token_s": bench.model.verify_cost.slope,
        },
        "cells": [{**asdict(cell), "relative_error": cell.relative_error} for cell in bench.cells],
    }
    _print(report, as_json)


def _replayed(
    requests: list[list[RoundTrace]], costs: Costs, policy: str, leniency: float, block: int, picture: Path | None
) -> dict[str, Any]:
    from specdiff_dist.simulate.comparison import Comparison, compare_all, parse_policy
    from specdiff_dist.simulate.replay import replay

    if policy == "all":
        compared = compare_all(requests, costs, leniency=leniency, block=block)
    else:
        name, parsed = parse_policy(policy)
        compared = Comparison({name: replay(parsed, requests, costs, leniency=leniency)})
    if picture is not None:
        _draw(picture, requests, compared)
    replays = compared.replays
    report: dict[str, Any] = {
        "mean_abs_deviation": {name: one.mean_abs_deviation for name, one in replays.items()},
        "expected_speedup": {name: one.expected_speedup for name, one in replays.items()},
        "mean_length": {name: sum(one.lengths) / len(one.lengths) for name, one in replays.items()},
        "num_rounds": len(next(iter(replays.values())).lengths),
        "costs": asdict(costs),
    }
    if compared.best_static_length is not None:
        report["best_static_length"] = compared.best_static_length
        report["closest_static_length"] = compared.closest_static_length
        report["closest_static_deviation"] = compared.closest_static_deviation
    return report


def _draw(picture: Path, requests: list[list[RoundTrace]], compared: Comparison) -> None:
    """The drafted request with the median number of rounds."""
    from specdiff_dist.pictures import draw_trajectories

    drafted = [sum(one.length > 0 for one in rounds) for rounds in requests]
    which = sorted((count, index) for index, count in enumerate(drafted) if count)[sum(map(bool, drafted)) // 2][1]
    span = slice(sum(drafted[:which]), sum(drafted[: which + 1]))
    oracle = next(iter(compared.replays.values())).oracle_lengths[span]
    lengths = {name: one.lengths[span] for name, one in compared.replays.items()}
    draw_trajectories(picture, lengths, oracle, f"request {which + 1} of {len(requests)}")


def _costs(
    requests: list[list[RoundTrace]] | None, draft: str | None, verify: str | None, other: Path | None, *, needed: bool
) -> Costs | None:
    """From the options, from another trace, from the trace itself, in this order."""
    from specdiff_dist.simulate.costs import Costs, fit_costs
    from specdiff_dist.simulate.trace import read_trace

    if draft is not None and verify is not None:
        return Costs(_line("--draft-cost", draft), _line("--verify-cost", verify))
    source = requests if other is None else read_trace(other)[1]
    if source is None:
        if draft is not None or verify is not None:
            raise InvalidConfig("give both --draft-cost and --verify-cost")
        return None
    if not needed:
        return None
    fitted = fit_costs(source)
    return Costs(
        fitted.draft if draft is None else _line("--draft-cost", draft),
        fitted.verify if verify is None else _line("--verify-cost", verify),
    )


def _line(option: str, text: str) -> LineFit:
    from specdiff_dist.core.throughput import LineFit

    try:
        base, per_token = map(float, text.split(","))
    except ValueError:
        base = per_token = -1.0
    if not (0.0 < base < 1e6 and 0.0 <= per_token < 1e6):
        raise InvalidConfig(f"{option} takes two numbers of seconds, base,per-token such as 0.02,0.001; not {text!r}")
    return LineFit(base, per_token)


def _print(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        shown = value if not isinstance(value, float) else f"{value:.4g}"
        print(f"{name:>24} {shown}")
