"""Rounds as they look on the wire, without a model: calls and replies with rows of realistic widths.

A target row falls off with rank r as r^-s, with an exponent s of its own for every position (text has certain and
uncertain ones); the proposal is the target with its logits disturbed. Token ids are scattered over the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from specdiff_dist.config import Effort
from specdiff_dist.core.features import FeatureArray
from specdiff_dist.core.rows import SparseRows
from specdiff_dist.types import (
    CallCost,
    DraftBlock,
    DraftCall,
    PrefixStatement,
    SamplingParams,
    TargetRows,
    VerifyCall,
)

NARROW = SamplingParams(temperature=1.0, top_k=50, top_p=0.95)
WIDE = SamplingParams()
EXPONENTS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)  # of the rows: from 50 likely tokens to one
HEAD = 2048  # most likely tokens of a row that are looked at; nothing below them would be sent
DISTURBANCE = 1.0  # standard deviation of the proposal's logits around the target's
NUM_CACHED = 600  # tokens of the session that both replicas have
NUM_NEW = 3  # tokens that the last round committed and the drafter has not read; of those the verifier lacks the anchor


@dataclass(frozen=True, slots=True)
class WireRound:
    """Both calls of a round and their replies."""

    draft_call: DraftCall
    block: DraftBlock
    verify_call: VerifyCall
    target: TargetRows


def make_round(
    sampling: SamplingParams,
    *,
    vocab_size: int,
    block: int,
    draft_top_k: int,
    seed: int,
    is_flat: bool = False,
    feature_size: int = 0,
) -> WireRound:
    """`is_flat`: the worst case, every row as wide as the parameters allow. `feature_size`: numbers per token of a drafter
    that needs features, 0 for one that does not."""
    rng = np.random.default_rng(seed)
    exponents = [0.0] * (block + 1) if is_flat else rng.choice(EXPONENTS, block + 1).tolist()
    targets = [_target_row(rng, exponent, vocab_size) for exponent in exponents]
    proposals = SparseRows.from_rows(
        [_truncated(_disturbed(rng, row), sampling, draft_top_k) for row in targets[:block]]
    )
    draft = np.array([_drawn(rng, *proposals.row(i)) for i in range(block)], np.int32)
    one = np.ones(block, np.float32)
    new = _ids(rng, NUM_NEW, vocab_size)
    prefix = PrefixStatement(f"{seed:032x}", 17, NUM_CACHED, 123456789, new)
    anchor = PrefixStatement(f"{seed:032x}", 17, NUM_CACHED + NUM_NEW - 1, 987654321, new[-1:])
    told = _features(rng, NUM_NEW - 1, feature_size)
    draft_call = DraftCall(prefix, block, Effort(), sampling, draft_top_k, seed, features=told)
    cost = CallCost(1e-6, 1e-6, 1, 1)
    verify_call = VerifyCall(
        anchor, draft, sampling, proposals if sampling.may_be_wide else None, rng.random(block + 1),
        feature_layers=(0,) if feature_size else (), feature_start=anchor.prefix_len,
    )  # fmt: skip
    target = _wide if sampling.may_be_wide else _narrow
    return WireRound(
        draft_call,
        DraftBlock(draft, proposals, one, one, NUM_CACHED + NUM_NEW - 1, cost),
        verify_call,
        target(rng, targets, verify_call, vocab_size, cost, _features(rng, verify_call.num_feature_rows, feature_size)),
    )


_Row = tuple[NDArray[np.integer], NDArray[np.floating]]  # token ids by falling probability, their probabilities


@cache
def _mass(exponent: float, vocab_size: int) -> float:
    return float((np.arange(1, vocab_size + 1) ** -exponent).sum())


def _target_row(rng: np.random.Generator, exponent: float, vocab_size: int) -> _Row:
    ids = rng.choice(vocab_size, min(HEAD, vocab_size), replace=False)
    return ids, np.arange(1, len(ids) + 1) ** -exponent / _mass(exponent, vocab_size)


def _disturbed(rng: np.random.Generator, row: _Row) -> _Row:
    ids, probs = row
    weights = probs * np.exp(DISTURBANCE * rng.standard_normal(len(probs)))
    order = np.argsort(-weights)
    return ids[order], weights[order]


def _truncated(row: _Row, sampling: SamplingParams, most: int) -> _Row:
    """Top-k, then top-p, then the `most` likely."""
    ids, probs = row
    keep = min(sampling.top_k or len(ids), len(ids))
    head = probs[:keep] / probs[:keep].sum()
    if sampling.top_p < 1.0:
        keep = int(np.count_nonzero(np.cumsum(head) - head < sampling.top_p))
    keep = min(keep, most)
    return ids[:keep], probs[:keep] / probs[:keep].sum()


def _drawn(rng: np.random.Generator, ids: NDArray[np.integer], probs: NDArray[np.floating]) -> int:
    law = probs.astype(np.float64)
    return int(rng.choice(ids, p=law / law.sum()))


def _narrow(
    rng: np.random.Generator, targets: list[_Row], call: VerifyCall, vocab_size: int, cost: CallCost,
    features: FeatureArray | None,
) -> TargetRows:  # fmt: skip
    rows = SparseRows.from_rows([_truncated(row, call.sampling, vocab_size) for row in targets])
    return TargetRows(rows, rows.row_sums(), None, None, NUM_CACHED + NUM_NEW + len(targets) - 1, cost, features)


def _wide(
    rng: np.random.Generator, targets: list[_Row], call: VerifyCall, vocab_size: int, cost: CallCost,
    features: FeatureArray | None,
) -> TargetRows:  # fmt: skip
    assert call.proposals is not None
    probs = np.empty_like(call.proposals.probs)
    for index, (ids, law) in enumerate(targets[:-1]):
        start, stop = call.proposals.row_splits[index : index + 2]
        order = np.argsort(ids)
        probs[start:stop] = law[order[np.searchsorted(ids[order], call.proposals.token_ids[start:stop])]]
    num_rows = len(targets)
    return TargetRows(
        SparseRows(call.proposals.row_splits, call.proposals.token_ids, probs), np.ones(num_rows),
        _ids(rng, num_rows - 1, vocab_size), _ids(rng, num_rows, vocab_size), NUM_CACHED + NUM_NEW + num_rows - 1, cost,
        features,
    )  # fmt: skip


def _features(rng: np.random.Generator, num_tokens: int, size: int) -> FeatureArray | None:
    return rng.standard_normal((num_tokens, size)).astype(np.float16) if size else None


def _ids(rng: np.random.Generator, num: int, vocab_size: int) -> np.ndarray:
    return rng.integers(vocab_size, size=num).astype(np.int32)
