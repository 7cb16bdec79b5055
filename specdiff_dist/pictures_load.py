"""Pictures of `specdiff bench load`, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdiff_dist.bench.load import Run
from specdiff_dist.bench.load_report import Interval
from specdiff_dist.pictures import new_figure, save_figure

SHOWN_S = 2.0  # of an overlap: whole runs have thousands of calls


def draw_load(path: Path, points: Sequence[Mapping[str, Any]]) -> None:
    """Aggregate tokens/s with speculation on and off, and their ratio, over the number of clients; bars: all repeats."""
    figure = new_figure(8.0, 6.5)
    speed, ratio = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    clients = [point["concurrency"] for point in points]
    for prefix, label, color in (("", "speculation on", "C0"), ("plain_", "off", "0.5")):
        _with_bars(speed, points, f"{prefix}tokens_per_s", label, color)
    speed.set_ylabel("tokens per second, all clients")
    speed.set_ylim(bottom=0)
    speed.legend(fontsize=8)
    _with_bars(ratio, [point for point in points if point["ratio"] is not None], "ratio", "", "C0")
    ratio.axhline(1.0, color="0.6", linestyle="--", linewidth=1)
    ratio.set_ylabel("on / off")
    ratio.set_xscale("log", base=2)
    ratio.set_xticks(clients, [str(count) for count in clients])
    ratio.set_xlabel("clients at once")
    save_figure(figure, path)


def draw_overlap(path: Path, intervals: Mapping[str, Sequence[Interval]], run: Run, overlap: float) -> None:
    """A lane per role, a box per forward, two seconds from the middle of the run; darker: more sessions in it."""
    figure = new_figure(11.0, 2.6)
    axes = figure.subplots()
    start_s = max((run.start_s + run.end_s - SHOWN_S) / 2, run.start_s)
    largest = max((count for lane in intervals.values() for _, _, count in lane), default=1)
    for at, lane in enumerate(intervals.values()):
        shown = [each for each in lane if each[1] > start_s and each[0] < start_s + SHOWN_S]
        axes.broken_barh(
            [((start - start_s) * 1e3, (end - start) * 1e3) for start, end, _ in shown],
            (at - 0.4, 0.8),
            facecolors=[(f"C{at}", 0.3 + 0.7 * count / largest) for _, _, count in shown],
            edgecolor="white",
            linewidth=0.4,
        )
    axes.set_yticks(range(len(intervals)), list(intervals))
    axes.set_xlim(0, SHOWN_S * 1e3)
    axes.set_xlabel("milliseconds")
    axes.set_title(
        f"who was busy when: over the whole run all busy time is {overlap:.2f} of wall time; "
        f"darkest: {largest} sessions in a forward",
        fontsize=9,
    )
    save_figure(figure, path)


def _with_bars(axes: Any, points: Sequence[Mapping[str, Any]], name: str, label: str, color: str) -> None:
    values = [point[name] for point in points]
    below = [point[name] - point[f"{name}_spread"][0] for point in points]
    above = [point[f"{name}_spread"][1] - point[name] for point in points]
    at = [point["concurrency"] for point in points]
    axes.errorbar(
        at, values, (below, above), fmt="o-", color=color, markersize=4, linewidth=1.4, capsize=3, label=label
    )
