"""Keeping a measured process to the cores it is measured on."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

_THREADS = Path("/proc/self/task")


def usable_cores() -> list[int]:
    """The cores this process may run on; empty where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def pin(cores: Collection[int]) -> None:
    """Keeps every thread of this process, and those they start later, to `cores`. Does nothing for no cores."""
    if not cores:
        return
    for thread in _THREADS.iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cores)
        except ProcessLookupError:  # it has just ended
            continue


@contextmanager
def pinned(cores: Collection[int]) -> Iterator[None]:
    """`pin`, taken back at the end."""
    before = usable_cores()
    pin(cores)
    try:
        yield
    finally:
        pin(before)
