"""Several processes of one training run, as torchrun starts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as distributed

_PATIENCE = timedelta(hours=12)  # rank 0 makes the data while the others wait


@contextmanager
def joined(device: str, num_threads: int | None = None) -> Iterator[str]:
    """Joins the processes that torchrun's environment names, if any. Yields the device of this one.

    num_threads: CPU threads of each process; None leaves them alone.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield device
        return
    is_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if is_gpu:
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', '0'))}"
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if is_gpu else "gloo", timeout=_PATIENCE)
    try:
        yield device
    finally:
        distributed.destroy_process_group()


def is_first() -> bool:
    return not distributed.is_initialized() or distributed.get_rank() == 0


def rank_and_world() -> tuple[int, int]:
    """Which of how many processes this one is."""
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def wait_for_all() -> None:
    if distributed.is_initialized():
        distributed.barrier()
