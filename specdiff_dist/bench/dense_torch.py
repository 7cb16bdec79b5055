"""What `specdiff bench core` compares with: the same decision on whole rows, as plain PyTorch does it.

With baselines.py the one place beside the models where torch may be imported (tests/test_imports.py): a baseline of ours
in NumPy would flatter us. float32, the linear rule min(1, (1-λ)p/q + λ), the residual by clamp, normalise, multinomial.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray


@contextmanager
def single_thread() -> Iterator[None]:
    """PyTorch on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class DenseTorch:
    """The same block over and over."""

    def __init__(
        self,
        target_probs: NDArray[np.float32],  # [d + 1, V] softmaxed
        draft_probs: NDArray[np.float32],  # [d, V] softmaxed
        token_ids: NDArray[np.integer],  # [d]
        accept_uniforms: NDArray[np.float64],  # [d]
        leniency: float,
    ) -> None:
        self._p, self._q = torch.from_numpy(target_probs), torch.from_numpy(draft_probs)
        self._tokens = torch.from_numpy(token_ids.astype(np.int64))[:, None]
        self._uniforms, self._leniency = torch.from_numpy(accept_uniforms), leniency

    def _num_accepted(self) -> torch.Tensor:
        p, q = self._p[:-1].gather(1, self._tokens), self._q.gather(1, self._tokens)
        ratio = (1.0 - self._leniency) * (p / q) + self._leniency
        return (self._uniforms < ratio[:, 0]).long().cumprod(0).sum()

    def one_row(self) -> tuple[int, int]:
        """`(num_accepted, recovered or bonus token)`, as transformers decides: the residual of one row only."""
        num_accepted = int(self._num_accepted())
        row = self._p[num_accepted]
        if num_accepted < len(self._q):
            row = torch.clamp(row - self._q[num_accepted], min=0.0)
            row = row / row.sum()
        return num_accepted, int(torch.multinomial(row, 1))

    def all_rows(self) -> tuple[int, int]:
        """The same without waiting for the outcome, as batched samplers on GPUs do: the residuals of all rows."""
        num_accepted = self._num_accepted()
        left = torch.clamp(self._p[:-1] - self._q, min=0.0)
        left = left / left.sum(-1, keepdim=True)
        drawn = torch.multinomial(torch.cat([left, self._p[-1:]]), 1)
        return int(num_accepted), int(drawn[num_accepted])

    def receipt(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """TV and KL between the law (1-λ)p + λq and p at every draft position: ([d], [d])."""
        target = self._p[:-1]
        law = (1.0 - self._leniency) * target + self._leniency * self._q
        tv = 0.5 * (law - target).abs().sum(-1)
        return tv.numpy(), (torch.xlogy(law, law) - torch.xlogy(law, target)).sum(-1).numpy()
