"""`specdiff bench core`: what one round's decision costs the router, on one thread.

The block is the worst case for its length: every draft token but the last is accepted, so that the receipt covers all
positions and a token must be recovered at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from specdiff_dist.core.acceptance import Acceptance, accept
from specdiff_dist.core.cactus import binary_kl, exact_gamma
from specdiff_dist.core.rows import FloatArray, IntArray, SparseRows
from specdiff_dist.core.rules import Cactus, Lenience, Linear, Lossless, Rule, TVBudget, Typical
from specdiff_dist.types import TargetRows

if TYPE_CHECKING:
    from specdiff_dist.bench.dense_torch import DenseTorch

LENIENCY = 0.3
RULES: dict[str, Rule] = {
    "lossless": Lossless(),
    "linear": Linear(LENIENCY),
    "tv_budget": TVBudget(0.1),
    "cactus": Cactus(0.5),
    "cactus_taylor": Cactus(0.5, "taylor"),
    "lenience": Lenience(0.3),
    "typical": Typical(0.5),
}
_ALMOST_ONE = 1.0 - 1e-9


@dataclass(frozen=True, slots=True)
class CoreCost:
    """Medians, in milliseconds on one thread. A decision is acceptance, the recovered token and the receipt."""

    sparse_ms: float  # linear rule, target rows as wide as the proposals
    dense_ms: float  # linear rule, the whole vocabulary in every target row
    ratio_vs_dense_torch: float  # dense_torch_ms["one_row"] over sparse_ms; the baseline makes no receipt
    newton_iterations: int  # most, over p in [1e-8, .9] × δ in [.01, 15]
    newton_error: float  # largest |KL - δ| there, nats
    sparse_ms_by_rule: Mapping[str, float]
    dense_torch_ms: Mapping[str, float]  # one_row, all_rows, receipt (to be added to either): bench/dense_torch.py
    vocab_size: int
    block: int
    support: int


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A drafted block with the verifier's answer, as sparse rows and whole."""

    token_ids: IntArray  # [d]
    proposals: SparseRows  # d rows
    sparse: TargetRows  # d + 1 rows
    dense: TargetRows  # d + 1 other rows, of the whole vocabulary
    accept_uniforms: FloatArray  # [d]
    target_uniforms: FloatArray  # [d + 1]

    def accept(self, rule: Rule, target: TargetRows) -> Acceptance:
        """The router's whole decision."""
        return accept(rule, self.token_ids, self.proposals, target, self.accept_uniforms, self.target_uniforms)

    def baseline(self) -> DenseTorch:
        """Plain PyTorch on the same whole rows."""
        from specdiff_dist.bench.dense_torch import DenseTorch

        target = self.dense.rows.probs.reshape(len(self.token_ids) + 1, -1)
        draft = np.zeros((len(self.token_ids), target.shape[1]), np.float32)
        draft[self.proposals.row_index(), self.proposals.token_ids] = self.proposals.probs
        return DenseTorch(target, draft, self.token_ids, self.accept_uniforms, LENIENCY)


def make_block(vocab_size: int, length: int, support: int, seed: int = 0) -> Block:
    """Random rows. Target and proposal share half of their mass, and half of a sparse target's tokens."""
    rng = np.random.default_rng(seed)
    proposed, narrow = [], []
    dense = rng.random((length + 1, vocab_size), np.float32)
    dense /= 2.0 * dense.sum(1, keepdims=True)
    for position in range(length + 1):
        ids = rng.choice(vocab_size, support + support // 2, replace=False)
        q, other = (rng.dirichlet(np.full(support, 0.5)) + 1e-6 for _ in range(2))
        q, other = q / q.sum(), other / other.sum()
        shared = np.zeros(support)
        shared[: support - support // 2] = q[support // 2 :]
        p = shared / shared.sum() + other
        proposed.append((ids[:support], q))
        narrow.append((ids[support // 2 :], p / p.sum()))
        dense[position, ids[:support]] += (q + other).astype(np.float32) / 4.0
    proposals = SparseRows.from_rows(proposed[:length])
    lengths = np.full(length + 1, vocab_size, np.int64)
    whole = SparseRows(
        np.concatenate([[0], np.cumsum(lengths)]),
        np.tile(np.arange(vocab_size, dtype=np.int32), length + 1),
        dense.ravel(),
    )
    # Each draft token is the likeliest that a sparse target has too; the last is one that it lacks.
    token_ids = np.array([ids[support // 2 + np.argmax(q[support // 2 :])] for ids, q in proposed[:length]], np.int32)
    ids, q = proposed[length - 1]
    token_ids[-1] = ids[np.argmax(q[: support // 2])]
    accept_uniforms = np.zeros(length)
    accept_uniforms[-1] = _ALMOST_ONE
    return Block(
        token_ids,
        proposals,
        _narrow(SparseRows.from_rows(narrow)),
        _narrow(whole),
        accept_uniforms,
        rng.random(length + 1),
    )


def measure_core(*, vocab_size: int = 151_936, block: int = 64, support: int = 64, num_runs: int = 200) -> CoreCost:
    """Times decisions on random rows. Whole rows take a tenth of the runs; contenders alternate, so that a busy machine
    slows all of them. Raises ImportError without torch."""
    from specdiff_dist.bench.dense_torch import single_thread

    rows = make_block(vocab_size, block, support)
    baseline = rows.baseline()
    with single_thread():
        whole = _medians(
            {
                "dense": lambda: rows.accept(RULES["linear"], rows.dense),
                "all_rows": baseline.all_rows,
                "receipt": baseline.receipt,
            },
            max(num_runs // 10, 3),
        )
        ours = {name: partial(rows.accept, rule, rows.sparse) for name, rule in RULES.items()}
        narrow = _medians({**ours, "torch": baseline.one_row}, num_runs)
    one_row_ms = narrow.pop("torch")
    iterations, error = newton_quality()
    return CoreCost(
        sparse_ms=narrow["linear"],
        dense_ms=whole.pop("dense"),
        ratio_vs_dense_torch=one_row_ms / narrow["linear"],
        newton_iterations=iterations,
        newton_error=error,
        sparse_ms_by_rule=narrow,
        dense_torch_ms={**whole, "one_row": one_row_ms},
        vocab_size=vocab_size,
        block=block,
        support=support,
    )


def newton_quality(num_probs: int = 2000, num_deltas: int = 100) -> tuple[int, float]:
    """Most iterations and largest |KL - δ| of the exact Cactus γ over a logarithmic grid. Where δ ≥ -ln p even γ = 1
    leaves budget over: no root, not counted."""
    p = np.geomspace(1e-8, 0.9, num_probs)
    most, error = 0, 0.0
    for delta in np.geomspace(0.01, 15.0, num_deltas):
        gamma, iterations = exact_gamma(p, float(delta))
        has_root = delta < -np.log(p)
        most = max(most, iterations)
        error = max(error, float(np.abs(binary_kl(gamma, p) - delta)[has_root].max(initial=0.0)))
    return most, error


def _narrow(rows: SparseRows) -> TargetRows:
    return TargetRows(rows, rows.row_sums(), None, None, 0)


def _medians(contenders: Mapping[str, Callable[[], object]], num_runs: int) -> dict[str, float]:
    """Milliseconds, by name; one run of each in turn."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for run in range(num_runs + 1):
        for name, call in contenders.items():
            started = perf_counter()
            call()
            if run:  # the first warms up
                times[name].append(perf_counter() - started)
    return {name: 1e3 * median(seconds) for name, seconds in times.items()}
