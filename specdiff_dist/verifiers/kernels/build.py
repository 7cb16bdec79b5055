"""Compiles block_layers.cpp for this very CPU at first use, as torch.compile does with its kernels, and keeps the result."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

from specdiff_dist.errors import ModelUnavailable
from specdiff_dist.models.cache import cache_root, locked, scratch_folder

COMPILERS = ("g++", "clang++")  # unless $CXX names one
FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC", "-w")
SOURCE = Path(__file__).with_name("block_layers.cpp")
TIMEOUT_S = 300
OFF = "SPECDIFF_NO_KERNELS"  # environment variable: anything but empty turns the kernels off

log = logging.getLogger(__name__)


@cache
def why_no_kernels() -> str | None:
    """None where the kernels run, else what is missing. Compiles them, once for a machine (some seconds)."""
    try:
        library()
    except ModelUnavailable as error:
        return str(error)
    return None


@cache
def library() -> ctypes.CDLL:
    """The compiled kernels. Raises ModelUnavailable when they cannot be had here."""
    if os.environ.get(OFF):
        raise ModelUnavailable(f"${OFF} is set")
    try:
        loaded = ctypes.CDLL(str(_compiled()))
    except OSError as error:
        raise ModelUnavailable(f"the compiled kernels cannot be used: {error}") from error
    loaded.scratch_size.restype = ctypes.c_int64
    return loaded


def _compiled() -> Path:
    """The shared object, from the cache folder or made now."""
    compiler = os.environ.get("CXX") or next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None or shutil.which(compiler) is None:
        raise ModelUnavailable(f"no C++ compiler ({compiler or ', '.join(COMPILERS)}); install one, for instance g++")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    parts = (SOURCE.read_bytes(), version.encode(), _cpu().encode(), " ".join(FLAGS).encode())
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    entry = cache_root() / "kernels" / f"block_layers-{digest}.so"
    if not entry.exists():
        with locked(entry, log.info):
            if not entry.exists():
                _compile(compiler, entry)
    return entry


def _compile(compiler: str, entry: Path) -> None:
    with scratch_folder(entry) as folder:
        made = folder / entry.name
        command = [compiler, *FLAGS, "-o", str(made), str(SOURCE)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise ModelUnavailable(f"{' '.join(command)} took over {TIMEOUT_S} s") from error
        if done.returncode:
            raise ModelUnavailable(f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}")
        os.replace(made, entry)


def _cpu() -> str:
    """What -march=native depends on: a cache folder may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
