"""What the processes of a Serve application use, read from /proc."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PROC = Path("/proc")
PAGE_KB = os.sysconf("SC_PAGE_SIZE") // 1024


@dataclass(frozen=True, slots=True)
class Usage:
    """One process at one time."""

    num_requests: int  # answered so far
    rss_kb: int
    num_fds: int
    num_threads: int


def serve_processes(app: str) -> dict[str, int]:
    """Process ids by deployment, in lower case, and `proxy`: the HTTP proxy of the same cluster. One replica each."""
    found, proxies = {}, {}
    for folder in PROC.iterdir():
        if not folder.name.isdigit():
            continue
        title = _title(folder)
        if title.startswith(f"ray::ServeReplica:{app}:"):
            found[title.split(":")[4].partition(".")[0].split("#")[0].split(" ")[0].lower()] = int(folder.name)
        elif title.startswith("ray::ProxyActor"):
            proxies[_parent(folder)] = int(folder.name)
    if found:  # another cluster may run on this machine: ours has the same raylet
        found["proxy"] = proxies[_parent(PROC / str(next(iter(found.values()))))]
    return found


def usage(pid: int, num_requests: int) -> Usage:
    """What the process uses now."""
    folder = PROC / str(pid)
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return Usage(
        num_requests,
        int((folder / "statm").read_text().split()[1]) * PAGE_KB,
        len(os.listdir(folder / "fd")),
        int(status["Threads"]),
    )


def slope_kb(samples: Sequence[Usage]) -> float:
    """Memory growth in kB per request, after the first third: caches fill, allocators learn their sizes."""
    late = samples[len(samples) // 3 :]
    return float(np.polyfit([each.num_requests for each in late], [each.rss_kb for each in late], 1)[0])


def _title(folder: Path) -> str:
    try:
        return (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:  # it has just ended
        return ""


def _parent(folder: Path) -> int:
    return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
