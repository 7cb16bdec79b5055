"""A cache folder whose entries are either complete or not there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

Progress = Callable[[str], None]
POLL_S = 0.1


def cache_root() -> Path:
    """$SPECDIFF_CACHE, else `specdiff` in $XDG_CACHE_HOME, else ~/.cache/specdiff."""
    own = os.environ.get("SPECDIFF_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specdiff"


@contextmanager
def locked(entry: Path, progress: Progress) -> Iterator[None]:
    """Holds the entry's lock between processes. The system frees it when its holder dies, however it dies."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(entry.parent / f"{entry.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(f"waiting for another process that prepares {entry.name}")
        lock.acquire(poll_interval=POLL_S)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def scratch_folder(entry: Path) -> Iterator[Path]:
    """A folder beside the entry, so that moving a result into place is one rename. Removed at the end; what a killed
    attempt left behind goes first. Hold the entry's lock."""
    prefix = f".{entry.name}.tmp-"
    for abandoned in entry.parent.glob(f"{prefix}*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=entry.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def move_into_place(result: Path, entry: Path) -> None:
    """Makes `result` (a folder on the same file system) the entry; an entry that was damaged gives way to it."""
    if entry.exists():
        shutil.rmtree(entry)
    os.replace(result, entry)
