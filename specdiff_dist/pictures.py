"""Pictures of measurements, as PNG files. matplotlib is only loaded when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdiff_dist.errors import InvalidConfig

if TYPE_CHECKING:
    from specdiff_dist.bench.engine import CostFit, EngineCell
    from specdiff_dist.bench.model import ModelBench
    from specdiff_dist.bench.router import RouterBench


def draw_trajectories(path: Path, lengths: Mapping[str, Sequence[int]], oracle: Sequence[int], title: str) -> None:
    """Speculative length over the rounds of one request, a panel per policy against the oracle (LibraSpec, Figure 5)."""
    figure = new_figure(9.0, 1.6 * len(lengths) + 0.8)
    rounds = range(1, len(oracle) + 1)
    panels = figure.subplots(len(lengths), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, chosen) in zip(panels, lengths.items(), strict=True):
        deviation = sum(abs(a - b) for a, b in zip(chosen, oracle, strict=True)) / len(oracle)
        axes.step(rounds, oracle, where="mid", color="0.6", linewidth=3, label="oracle")
        axes.step(rounds, chosen, where="mid", color="C0", linewidth=1.4, label=name)
        axes.set_title(f"{name}: mean |deviation| {deviation:.2f}", fontsize=9, loc="left")
        axes.set_ylabel("length")
    panels[-1].set_xlabel("round")
    figure.suptitle(f"{title}: speculative length by round, blue the policy's, grey the oracle's", fontsize=10)
    save_figure(figure, path)


def draw_throughput(path: Path, bench: ModelBench) -> None:
    """Four panels: acceptance, tokens per round, throughput, predicted against measured (Two Tradeoffs, Figure 3)."""
    figure = new_figure(9.0, 7.0)
    (acceptance, tokens), (throughput, scatter) = figure.subplots(2, 2)
    for index, steps in enumerate(sorted({cell.num_steps for cell in bench.cells})):
        cells = sorted((cell for cell in bench.cells if cell.num_steps == steps), key=lambda cell: cell.leniency)
        x, color = [cell.leniency for cell in cells], f"C{index}"
        for axes, measured, predicted in (
            (acceptance, [cell.acceptance for cell in cells], [cell.predicted_acceptance for cell in cells]),
            (tokens, [cell.tokens_per_round for cell in cells], [cell.predicted_tokens_per_round for cell in cells]),
            (throughput, [cell.tokens_per_s for cell in cells], [cell.predicted_tokens_per_s for cell in cells]),
        ):
            axes.plot(x, measured, "o", color=color, label=f"K = {steps}")
            axes.plot(x, predicted, "-", color=color, linewidth=1)
        scatter.plot(
            [cell.tokens_per_s for cell in cells], [cell.predicted_tokens_per_s for cell in cells], "o", color=color
        )
    for axes, what in (
        (acceptance, "mean acceptance"), (tokens, "tokens per round"), (throughput, "tokens per second"),
    ):  # fmt: skip
        axes.set_xlabel("leniency λ")
        axes.set_ylabel(what)
    acceptance.legend(fontsize=8, title="dots measured, lines predicted", title_fontsize=8)
    low, high = scatter.get_xlim()
    scatter.plot([low, high], [low, high], "--", color="0.6")
    scatter.set_xlabel("measured tokens per second")
    scatter.set_ylabel("predicted")
    scatter.set_title(f"median relative error {bench.median_relative_error:.1%}", fontsize=9)
    save_figure(figure, path)


def draw_sweep(path: Path, cells: Sequence[Mapping[str, Any]]) -> None:
    """Speed against mean TV, a line per effort K along rising leniency, and the joint frontier: `sweep` of
    `specdiff bench speed --sweep`."""
    from specdiff_dist.bench.sweep import frontier, point_of

    figure = new_figure(8.0, 5.5)
    axes = figure.subplots()
    best = frontier([point_of(cell) for cell in cells])
    axes.plot(
        [one.mean_tv for one in best], [one.speedup_vs_plain for one in best], "-", color="0.8", linewidth=7,
        solid_capstyle="round", zorder=1, label="joint frontier",
    )  # fmt: skip
    for index, steps in enumerate(sorted({cell["k"] for cell in cells})):
        line = sorted((cell for cell in cells if cell["k"] == steps), key=lambda cell: cell["leniency"])
        x, y = [cell["mean_tv"] for cell in line], [cell["speedup_vs_plain"] for cell in line]
        axes.plot(x, y, "o-", color=f"C{index}", linewidth=1.4, markersize=4, label=f"K = {steps}")
        for cell, at in zip(line, zip(x, y, strict=True), strict=True):
            axes.annotate(f"{cell['leniency']:g}", at, textcoords="offset points", xytext=(4, 4), fontsize=7)
    axes.axhline(1.0, color="0.6", linestyle="--", linewidth=1)
    axes.set_xlabel("mean TV per token from the verifier's law")
    axes.set_ylabel("speed over plain decoding")
    axes.legend(fontsize=8, title="numbers at the dots: leniency λ", title_fontsize=8)
    save_figure(figure, path)


def draw_engine(path: Path, cells: Sequence[EngineCell], fit: CostFit) -> None:
    """Two panels: the cost of a shared forward over its tokens with the fitted plane, and what sharing is worth."""
    figure = new_figure(9.0, 4.2)
    cost, gain = figure.subplots(1, 2)
    for index, num in enumerate(sorted({cell.num_sessions for cell in cells})):
        line = sorted((cell for cell in cells if cell.num_sessions == num), key=lambda cell: cell.num_tokens)
        tokens, color = [cell.num_tokens for cell in line], f"C{index}"
        total = [num * count for count in tokens]
        cost.plot(total, [cell.together_ms for cell in line], "o", color=color, label=f"{num}")
        cost.plot(total, [fit(num, count) for count in tokens], "-", color=color, linewidth=1)
        gain.plot(tokens, [cell.speedup for cell in line], "o-", color=color, linewidth=1.4, markersize=4)
    for axes, x, y in (
        (cost, "tokens of all sessions", "ms, one forward"),
        (gain, "tokens of each session", "speed-up"),
    ):
        axes.set_xscale("log", base=2)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
    cost.set_yscale("log")
    cost.legend(fontsize=8, title="sessions (dots measured, lines fitted)", title_fontsize=8)
    gain.axhline(1.0, color="0.6", linestyle="--", linewidth=1)
    gain.set_title("one forward over one after another", fontsize=9)
    save_figure(figure, path)


def draw_router(path: Path, bench: RouterBench) -> None:
    """Two panels over the number of sessions: added latency, and CPU time per round with its slope."""
    figure = new_figure(9.0, 4.2)
    added, cost = figure.subplots(1, 2)
    sessions = [point.sessions for point in bench.points]
    added.plot(sessions, [point.p50_added_ms for point in bench.points], "o-", color="C0", label="median")
    added.plot(sessions, [point.p99_added_ms for point in bench.points], "s-", color="C3", label="99 of 100")
    for point in bench.points:
        added.annotate(
            f"{point.rounds_per_s:.0f}/s", (point.sessions, point.p99_added_ms), textcoords="offset points",
            xytext=(0, 6), ha="center", fontsize=7,
        )  # fmt: skip
    added.set_ylabel("added to a round, ms")
    added.set_ylim(bottom=0.0)
    added.legend(fontsize=8, title="numbers: rounds/s", title_fontsize=8)
    cost.plot(sessions, [point.cpu_us_per_round for point in bench.points], "o-", color="C0")
    cost.axhline(
        bench.saturated.cpu_us_per_round, color="0.6", linestyle="--", linewidth=1,
        label=f"saturated: {bench.saturated.rounds_per_s:.0f} rounds/s",
    )  # fmt: skip
    cost.set_ylabel("CPU time per round, µs")
    cost.set_ylim(bottom=0.0)
    cost.set_title(
        f"slope {bench.slope_us_per_session:.3f} µs per session, {bench.loaded_slope_us_per_session:.3f} under equal load",
        fontsize=9,
    )
    cost.legend(fontsize=8)
    for axes in (added, cost):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("sessions at once")
        axes.set_xticks(sessions, [str(count) for count in sessions])
    figure.suptitle("One router process on one core, synthetic replicas", fontsize=10)
    save_figure(figure, path)


def draw_wire(path: Path, cases: Mapping[str, Mapping[str, Any]], dense_bytes: int) -> None:
    """Bytes of a round against dense rows, and the times of both transports: `cases` of `specdiff bench wire`."""
    figure = new_figure(10.0, 4.0)
    sizes, times = figure.subplots(1, 2, sharey=True)
    rows = range(len(cases))
    totals = [case["bytes_per_round"] for case in cases.values()]
    sizes.barh(rows, totals)
    for row, total in zip(rows, totals, strict=True):
        sizes.annotate(f"{total:,.0f}", (total, row), textcoords="offset points", xytext=(3, -3), fontsize=8)
    sizes.axvline(dense_bytes, color="0.6", linestyle="--", linewidth=1, label=f"dense: {dense_bytes / 1e6:.1f} MB")
    sizes.set_xscale("log")
    sizes.set_xlim(1e3, 3 * dense_bytes)
    sizes.set_xlabel("bytes per round, both calls, both ways")
    sizes.set_yticks(rows, list(cases), fontsize=8)
    sizes.invert_yaxis()
    sizes.legend(fontsize=8, loc="upper right")
    for shift, name in ((-0.18, "grpc"), (0.18, "handle")):
        measured = [case.get(f"{name}_ms", 0.0) for case in cases.values()]
        times.barh([row + shift for row in rows], measured, height=0.34, label=name)
    times.set_xlabel("milliseconds per round, both calls, without models")
    times.legend(fontsize=8)
    save_figure(figure, path)


def new_figure(width: float, height: float) -> Any:
    """A matplotlib Figure; inches."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Raises InvalidConfig when the file cannot be written."""
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise InvalidConfig(f"cannot write the picture {path}: {error.strerror}") from error
