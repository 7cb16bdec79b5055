"""How good a draft network is on held-out answers: one denoising step over fully masked blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdiff_dist.core.calibration import NUM_BINS, bins_of
from specdiff_dist.train.blocks import BlockBatch
from specdiff_dist.train.losses import distances
from specdiff_dist.train.network import DraftNetwork


@dataclass(frozen=True, slots=True, eq=False)
class Outcomes:
    """One row per block, one column per position; False and 0 beyond the answer's end.

    A position is `reached` while the drafter's most probable tokens before it are the answer's own: its row then really
    is what the verifier would be asked about.
    """

    answer: NDArray[np.int64]  # [N]: which blocks belong to the same answer
    is_known: NDArray[np.bool_]  # [N, B]
    is_match: NDArray[np.bool_]  # the most probable tokens agree
    is_reached: NDArray[np.bool_]
    overlap: NDArray[np.float32]  # 1 - TV at temperature 1
    confidence: NDArray[np.float32]  # the drafter's largest probability at temperature 1


@dataclass(frozen=True, slots=True)
class Evaluation:
    """By block position 1 … B, and summed up."""

    match: list[float]  # share of positions where draft and verifier have the same most probable token
    tv: list[float]  # mean total variation at temperature 1
    accepted_greedy: float  # expected accepted tokens of a block at temperature 0
    accepted_sampled: float  # at temperature 1: mean of Σ_j Π_{i≤j} (1 - TV_i)
    ece: float  # expected calibration error of confidence as probability of a match
    ece_by_position: list[float]
    num_blocks: int

    def as_json(self) -> dict[str, Any]:
        def rounded(value: Any) -> Any:
            if isinstance(value, list):
                return [round(item, 4) for item in value]
            return round(value, 4) if isinstance(value, float) else value

        return {name: rounded(value) for name, value in asdict(self).items()}

    @property
    def score(self) -> float:
        """What training is to raise."""
        return (self.accepted_greedy + self.accepted_sampled) / 2


@torch.no_grad()
def observe(network: DraftNetwork, batches: Iterable[BlockBatch]) -> Outcomes:
    """Runs held-out batches, whose blocks are fully masked."""
    parts: list[dict[str, np.ndarray]] = []
    num_answers = 0
    device = network.output.device
    for batch in batches:
        batch = batch.to(device)
        logits = network(batch).float()
        found = distances(logits, batch.targets)
        best = logits.amax(dim=-1)
        confidence = torch.exp(best - torch.logsumexp(logits, dim=-1))
        columns = logits.argmax(dim=-1)
        values = {
            "is_known": torch.ones_like(columns, dtype=torch.bool),
            "is_match": columns == batch.targets.top_column,
            "is_reached": columns == batch.targets.drawn_column,
            "overlap": found.overlap.clamp(0.0, 1.0),
            "confidence": confidence,
        }
        counts = np.diff(batch.block_splits)
        part: dict[str, np.ndarray] = {"answer": num_answers + np.repeat(np.arange(len(counts)), counts)}
        num_answers += len(counts)
        for name, value in values.items():
            grid = np.zeros(batch.block_ids.shape, bool if value.dtype == torch.bool else np.float32)
            grid.flat[batch.wanted.cpu().numpy()] = value.cpu().numpy()
            part[name] = grid
        parts.append(part)
    grids = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    follows = np.logical_and.accumulate(grids["is_reached"], axis=1)
    grids["is_reached"] = np.concatenate([np.ones_like(follows[:, :1]), follows[:, :-1]], axis=1) & grids["is_known"]
    return Outcomes(**grids)


def summarise(outcomes: Outcomes) -> Evaluation:
    known = outcomes.is_known
    match, overlap = outcomes.is_match & known, np.where(known, outcomes.overlap, 0.0)
    counts = np.maximum(known.sum(axis=0), 1)
    greedy = np.logical_and.accumulate(match, axis=1)
    return Evaluation(
        match=(match.sum(axis=0) / counts).tolist(),
        tv=((known * (1.0 - overlap)).sum(axis=0) / counts).tolist(),
        accepted_greedy=float(greedy.sum(axis=1).mean()),
        accepted_sampled=float(np.cumprod(overlap, axis=1).sum(axis=1).mean()),
        ece=calibration_error(outcomes.confidence[known], outcomes.is_match[known]),
        ece_by_position=[
            calibration_error(outcomes.confidence[known[:, j], j], outcomes.is_match[known[:, j], j])
            for j in range(known.shape[1])
        ],
        num_blocks=len(known),
    )


def calibration_error(predicted: NDArray[np.floating], happened: NDArray[np.bool_]) -> float:
    """Expected calibration error: mean gap between predicted and observed frequency over 16 equal bins."""
    if not len(predicted):
        return 0.0
    gaps = np.bincount(bins_of(predicted), weights=predicted - happened, minlength=NUM_BINS)
    return float(np.abs(gaps).sum() / len(predicted))
