"""Accepting a draft block.

Terms, as vLLM's rejection sampler uses them:
    accepted tokens   draft tokens kept, a prefix of the block
    recovered token   drawn from the residual norm([p̃ - q]+) at the first rejection
    bonus token       drawn from the plain target p after a block that was accepted whole
Every round commits `accepted + 1` tokens: the accepted ones and one recovered or bonus token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdiff_dist.core import sampling
from specdiff_dist.core.rows import FloatArray, IntArray, SparseRows, lookup, token_keys
from specdiff_dist.core.rules import Rule, accept_ratios, law_divergence
from specdiff_dist.errors import InvalidRows
from specdiff_dist.types import TargetRows


@dataclass(frozen=True, slots=True, eq=False)
class Acceptance:
    """The outcome of one round. `tv`, `kl` are per committed token: how far the law it was drawn from is from p."""

    num_accepted: int
    token_ids: IntArray  # [num_accepted + 1]
    tv: FloatArray  # [num_accepted + 1]
    kl: FloatArray  # [num_accepted + 1], nats; inf possible


def accept(
    rule: Rule,
    draft_token_ids: IntArray,
    proposals: SparseRows,
    target: TargetRows,
    accept_uniforms: FloatArray,
    target_uniforms: FloatArray,
) -> Acceptance:
    """One round of speculative sampling (Leviathan et al. 2023, Algorithm 1; rules: core/rules.py).

    Args:
        draft_token_ids: [d], d = 0 is plain decoding.
        proposals: d rows, the distributions the tokens were drawn from.
        target: rows at the d draft positions and the one after.
        accept_uniforms: [d]; target_uniforms: [d + 1] (for wide targets the draws were already made with them).

    Raises InvalidRows when a draft token has no probability in its own proposal, or rows do not fit together.
    """
    num_draft = len(draft_token_ids)
    if proposals.num_rows != num_draft or len(target.row_mass) != num_draft + 1:
        raise InvalidRows(
            f"{num_draft} draft tokens came with {proposals.num_rows} proposals and {len(target.row_mass)} target rows"
        )
    draft_probs = proposals.normalised()
    target_probs = target.rows.probs.astype(np.float64) / target.row_mass[target.rows.row_index()]

    tokens = token_keys(draft_token_ids)
    draft_at_token = lookup(proposals, draft_probs, tokens)
    if np.any(draft_at_token <= 0.0):
        raise InvalidRows("a draft token has probability 0 in its own proposal")
    target_at_token = lookup(target.rows, target_probs, tokens)

    num_accepted = sampling.count_accepted(accept_ratios(rule, target_at_token, draft_at_token), accept_uniforms)
    if num_accepted == num_draft:
        last = _bonus(target, target_probs, num_draft, target_uniforms)
    else:
        last = _recovered(proposals, draft_probs, target, target_probs, num_accepted, target_uniforms)

    # Receipt: the law at every reached draft position is p̃ whether its token was accepted or recovered; a bonus is p.
    num_reached = min(num_accepted + 1, num_draft)
    entries = int(proposals.row_splits[num_reached])
    on_support = lookup(target.rows, target_probs, proposals.keys()[:entries])
    tv, kl = law_divergence(rule, on_support, draft_probs[:entries], proposals.row_index()[:entries], num_reached)
    bonus_zero = np.zeros(num_accepted + 1 - num_reached)
    return Acceptance(
        num_accepted,
        np.append(draft_token_ids[:num_accepted], np.int32(last)).astype(np.int32),
        np.concatenate([tv, bonus_zero]),
        np.concatenate([kl, bonus_zero]),
    )


def _bonus(target: TargetRows, target_probs: FloatArray, position: int, uniforms: FloatArray) -> int:
    if target.plain_token_ids is not None:
        return int(target.plain_token_ids[position])
    ids, row = _row(target.rows, target_probs, position)
    return int(ids[sampling.draw_index(row, float(uniforms[position]))])


def _recovered(
    proposals: SparseRows,
    draft_probs: FloatArray,
    target: TargetRows,
    target_probs: FloatArray,
    position: int,
    uniforms: FloatArray,
) -> int:
    if target.recovered_token_ids is not None:
        return int(target.recovered_token_ids[position])
    ids, row = _row(target.rows, target_probs, position)
    draft_ids, draft_row = _row(proposals, draft_probs, position)
    return int(ids[sampling.draw_index(residual(ids, row, draft_ids, draft_row), float(uniforms[position]))])


def residual(
    target_ids: IntArray, target_probs: FloatArray, draft_ids: IntArray, draft_probs: FloatArray
) -> FloatArray:
    """[p - q]+ on the target's support (unnormalised), float64; p itself where that is empty (p = q up to rounding).

    It lives on supp(p) alone, because q > 0 = p gives 0. Ids ascend in both rows.
    """
    at = np.minimum(np.searchsorted(draft_ids, target_ids), len(draft_ids) - 1)
    draft_on_target = np.where(draft_ids[at] == target_ids, draft_probs[at], 0.0)
    positive = np.maximum(target_probs - draft_on_target, 0.0)
    return positive if positive.sum() > 0.0 else target_probs


def _row(rows: SparseRows, probs: FloatArray, index: int) -> tuple[IntArray, FloatArray]:
    start, stop = rows.row_splits[index], rows.row_splits[index + 1]
    return rows.token_ids[start:stop], probs[start:stop]
