"""Where a model lives, and in what numbers."""

from __future__ import annotations

from pathlib import Path

import torch

from specdiff_dist.errors import InvalidConfig

INT4 = "int4"  # matrices in the 4-bit blocks they are stored in (kernels/)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # of verifiers


CGROUP = Path("/sys/fs/cgroup")


def free_memory(device_type: str) -> int:
    """Bytes: of the GPU that this process computes on, or of this machine within its control group's limit."""
    if device_type == "cuda":
        return torch.cuda.mem_get_info()[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return free if limit == "max" else min(free, max(int(limit) - int(used), 0))
    except (OSError, ValueError):  # no control groups, or of the old kind
        return free


def pick_dtype(dtype: str) -> torch.dtype:
    """`auto` is bfloat16. Raises InvalidConfig on a dtype that verifiers do not have, or only some of them (int4)."""
    if dtype == INT4:
        raise InvalidConfig("int4 is for Llama models whose weights are 4-bit blocks (GGUF Q4_1); use bfloat16")
    if dtype != "auto" and dtype not in DTYPES:
        raise InvalidConfig(f"verifier dtype must be auto, {', '.join(DTYPES)} or int4, not {dtype!r}")
    return DTYPES.get(dtype, torch.bfloat16)


def pick_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises InvalidConfig on a device that torch cannot name or find."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        named = torch.device(device)
    except RuntimeError as error:
        raise InvalidConfig(f"unknown device {device!r}: {error}") from error
    if named.type == "cuda" and (named.index or 0) >= torch.cuda.device_count():
        raise InvalidConfig(f"no device {device!r} here ({torch.cuda.device_count()} CUDA devices); use cpu or auto")
    return named
