"""`specdiff bench engine`: what batching verify calls is worth on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress

from specdiff_dist.cli_options import Dtype, Json, Model, Threads, stderr


def bench_engine(
    model: Model = "smollm2-135m",
    dtype: Dtype = "auto",
    threads: Threads = None,
    num_cached: Annotated[int, typer.Option(min=1, help="Tokens of each session's prefix.")] = 200,
    num_repeats: Annotated[int, typer.Option(min=1, help="Measurements per number, after one for nothing.")] = 7,
    picture: Annotated[Path | None, typer.Option(help="Cost over tokens and sessions, as PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Verify calls of several sessions in one forward against one after another, and what a forward costs."""
    from specdiff_dist.bench.baselines import num_threads
    from specdiff_dist.bench.engine import SESSIONS, TOKENS, compare_logits, fit_cost, make_sessions, measure_cells
    from specdiff_dist.models import resolve
    from specdiff_dist.verifiers import load_forward

    with stderr.status(f"loading {escape(model)}"):
        forward = load_forward(resolve(model).path, dtype, "auto", num_threads=threads)
        sessions = make_sessions(forward.vocab_size, num_cached=num_cached)
    grid = [(num, tokens) for num in SESSIONS for tokens in TOKENS]
    with Progress(console=stderr, transient=True) as progress:
        task = progress.add_task("measuring", total=len(grid))
        cells = measure_cells(
            forward, sessions, num_repeats=num_repeats, grid=grid, on_cell=lambda _: progress.advance(task)
        )
    agreement, fit = compare_logits(forward, sessions), fit_cost(cells)
    if picture is not None:
        from specdiff_dist.pictures import draw_engine

        draw_engine(picture, cells, fit)
    (eight,) = (cell for cell in cells if (cell.num_sessions, cell.num_tokens) == (8, 8))
    report: dict[str, Any] = {
        "batched_speedup": eight.speedup,
        **asdict(agreement),
        "cost_fit": asdict(fit),
        "cells": [{**asdict(cell), "speedup": cell.speedup} for cell in cells],
        "setting": {
            "model": model, "dtype": forward.dtype, "device": forward.device_type,
            "num_threads": num_threads()["here"], "num_cached": num_cached, "num_repeats": num_repeats,
        },
    }  # fmt: skip
    if as_json:
        print(json.dumps(report))
        return
    for cell in cells:
        print(
            f"{cell.num_sessions:3d} sessions × {cell.num_tokens:3d} tokens: together {cell.together_ms:8.1f} ms, "
            f"apart {cell.apart_ms:8.1f} ms, {cell.speedup:.2f}×"
        )
    print(f"8 × 8: {eight.speedup:.2f}×, largest logit difference {agreement.max_logit_difference:.1e}")
    print(
        f"cost: {fit.base_ms:.1f} ms + {fit.per_token_ms:.2f} a token + {fit.per_session_ms:.2f} a session, median error "
        f"{fit.median_relative_error:.1%}"
    )
