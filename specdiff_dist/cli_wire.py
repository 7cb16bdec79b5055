"""`specdiff bench wire`: what a round costs on the wire."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specdiff_dist.cli_options import Json, stderr
from specdiff_dist.errors import InvalidConfig

if TYPE_CHECKING:
    from specdiff_dist.bench.wire import Shape
    from specdiff_dist.bench.wire_rounds import WireRound

NUM_DIFFERENT_ROUNDS = 20


def bench_wire(
    num_runs: Annotated[int, typer.Option(min=2, help="Rounds per transport and case.")] = 200,
    vocab_size: Annotated[int, typer.Option(min=100)] = 151_936,
    block: Annotated[int, typer.Option("--block", "--length", min=1, help="Tokens drafted in a round.")] = 16,
    draft_top_k: Annotated[int, typer.Option(min=1, help="Tokens a proposal keeps.")] = 64,
    with_transports: Annotated[
        bool, typer.Option("--transports/--bytes-only", help="Also time both transports, on a Ray of its own.")
    ] = True,
    picture: Annotated[Path | None, typer.Option(help="Bytes by message and times by transport, as PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Bytes of a round, truncated and full target rows, with features, zipped; gRPC against Serve handles, in turns."""
    from specdiff_dist.bench.wire import FLAT, FULL, TRUNCATED, Shape, make_cases, measure_bytes

    shape = Shape(vocab_size, block, draft_top_k)
    with stderr.status("making rounds"):
        cases = make_cases(shape, min(num_runs, NUM_DIFFERENT_ROUNDS))
        found: dict[str, dict[str, Any]] = {name: asdict(measure_bytes(rounds)) for name, rounds in cases.items()}
    report: dict[str, Any] = {
        "truncated_bytes_per_round": found[TRUNCATED]["bytes_per_round"],
        "widest_truncated_bytes_per_round": found[FLAT]["bytes_per_round"],
        "full_bytes_per_round": found[FULL]["bytes_per_round"],
        "dense_bytes_per_round": shape.dense_bytes,
    }
    if with_transports:
        times, by_size = _timed(shape, cases, num_runs)
        for name, each in times.items():
            found[name] |= each
        report |= times[TRUNCATED]
        report["handle_ms_by_call_size"] = by_size
    report["cases"] = found
    report["setting"] = {
        **asdict(shape), "num_runs": num_runs, "num_cores": os.cpu_count(), "python": platform.python_version(),
        "machine": f"{platform.machine()} {platform.system()}",
    }  # fmt: skip
    if picture is not None:
        from specdiff_dist.pictures import draw_wire

        draw_wire(picture, found, shape.dense_bytes)
    if as_json:
        print(json.dumps(report))
    else:
        _print(report)


def _timed(shape: Shape, cases: Mapping[str, list[WireRound]], num_runs: int) -> tuple[dict[str, Any], list[Any]]:
    try:
        from deployments.bench_wire import measure_transports
    except ImportError as error:
        raise InvalidConfig(f"{error}; run this in the checkout, or use --bytes-only") from error
    with Progress(console=stderr, transient=True) as bar:
        at = bar.add_task("starting Ray, then measuring", total=len(cases) * num_runs)
        return measure_transports(shape, cases, num_runs=num_runs, progress=lambda: bar.advance(at))


def _print(report: Mapping[str, Any]) -> None:
    """A table for a person; --json has the rest."""
    columns = {
        "bytes_per_round": "bytes a round", "gzip_bytes_per_round": "zipped", "gzip_ms": "zipping ms",
        "codec_ms": "codec ms", "grpc_ms": "gRPC ms", "handle_ms": "handle ms",
    }  # fmt: skip
    table = Table(box=None)
    table.add_column("")
    for title in columns.values():
        table.add_column(title, justify="right")
    for name, numbers in report["cases"].items():
        table.add_row(name, *(f"{numbers[key]:,.6g}" if key in numbers else "" for key in columns))
    table.add_row("dense float32", f"{report['dense_bytes_per_round']:,}")
    Console(width=max(120, Console().width)).print(table)
