"""`specdiff bench router`: what one router process carries."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specdiff_dist.cli_options import Json, Tier, given, quality_of, stderr
from specdiff_dist.config import DEFAULT_TIER, TIERS
from specdiff_dist.errors import InvalidConfig

if TYPE_CHECKING:
    from specdiff_dist.bench.router import RouterBench

COLUMNS = {
    "sessions": "sessions", "draft_ms": "draft ms", "verify_ms": "verify ms", "rounds_per_s": "rounds/s",
    "p50_added_ms": "p50 added ms", "p99_added_ms": "p99 added ms", "cpu_us_per_round": "CPU µs/round",
    "drafts_per_round": "drafts/round", "verified_per_round": "verified/round", "tokens_per_round": "tokens/round",
    "bytes_per_round": "bytes/round",
}  # fmt: skip


def bench_router(
    sessions: Annotated[int, typer.Option(min=1, help="At once, for the headline numbers.")] = 256,
    others: Annotated[str, typer.Option(help="Other numbers of sessions, for the slope.")] = "1,16,64,1000",
    offered: Annotated[
        float, typer.Option(min=1.0, help="Rounds/s that the replicas allow: their latencies grow beyond it.")
    ] = 900.0,
    seconds: Annotated[float, typer.Option(min=0.1, help="Measured for each number of sessions.")] = 8.0,
    block: Annotated[int, typer.Option(min=1, max=64, help="Most tokens that a draft call gives.")] = 8,
    features: Annotated[
        int, typer.Option(min=0, max=30, help="Verifier layers whose hidden states travel, 1,152 bytes a token each.")
    ] = 0,
    tier: Tier = None,
    quality: Annotated[
        str | None, typer.Option(help="What the HTTP field `quality` takes, as JSON: '{\"speculation\": 8}'.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw it here, as PNG.")] = None,
    as_json: Json = False,
) -> None:
    """How many rounds one router process carries on one core, and what it adds to each.

    The real round loop and gRPC clients, over synthetic replicas in a process of their own: these answer narrow rows (top-k
    50) after stated latencies, 10 ms a draft and 50 ms a verification at least. Added is what a round takes beyond them.
    """
    from specdiff_dist.bench.router import RouterLoad, measure_router
    from specdiff_dist.bench.synthetic_pair import PairShape
    from specdiff_dist.quality import resolve_quality

    asked = {**given(tier=tier), **(quality_of(quality, None, None, None) or {})}
    _, config = resolve_quality(asked, default_tier=DEFAULT_TIER, tiers=TIERS, drafter=None)
    counts = sorted({sessions, *_counts(others)})
    shape = PairShape(block=block, feature_layers=tuple(range(features)))
    with Progress(console=stderr, transient=True) as bar:
        task = bar.add_task("measuring", total=len(counts) + 1)
        bench = measure_router(
            RouterLoad(config, offered, seconds), counts, sessions, shape, progress=lambda: bar.advance(task)
        )
    if picture is not None:
        from specdiff_dist.pictures import draw_router

        draw_router(picture, bench)
    if as_json:
        print(json.dumps(bench.report()))
    else:
        _print(bench)


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",") if part]
    except ValueError:
        counts = [0]
    if min(counts, default=1) < 1:
        raise InvalidConfig(f"--others takes numbers of sessions, such as 1,16,1000; not {text!r}")
    return counts


def _print(bench: RouterBench) -> None:
    table = Table(box=None)
    for title in COLUMNS.values():
        table.add_column(title, justify="right")
    for point in (*bench.points, bench.saturated):
        numbers = asdict(point)
        table.add_row(*(f"{numbers[name]:.4g}" for name in COLUMNS))
    Console(width=max(140, Console().width)).print(table)
    print("last line: the least latencies, so that nothing but the router limits the rounds")
    print(
        f"each further session costs a round {bench.slope_us_per_session:.3f} µs of CPU, "
        f"{bench.loaded_slope_us_per_session:.3f} where the latencies have grown"
    )
