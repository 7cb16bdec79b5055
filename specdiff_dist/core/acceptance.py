"""Accepting a draft block.

Terms, as vLLM's rejection sampler uses them:
    accepted tokens   draft tokens kept, a prefix of the block
    recovered token   drawn from the residual norm([s·p - q]+) at the first rejection
    bonus token       drawn from the plain target p after a block that was accepted whole
Every round commits `accepted + 1` tokens: the accepted ones and one recovered or bonus token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specdiff_dist.core import sampling
from specdiff_dist.core.limits import NO_LIMITS, TVLimits, decide
from specdiff_dist.core.rows import FloatArray, IntArray, SparseRows, entries_of
from specdiff_dist.core.rules import Rule, needs_entropy
from specdiff_dist.core.support import SupportRows
from specdiff_dist.errors import InvalidRequest, InvalidRows
from specdiff_dist.types import TargetRows


@dataclass(frozen=True, slots=True)
class Recovery:
    """A recovered token that only the holder of the whole target row can draw: norm([scale·p - q]+) at `position`."""

    position: int  # row within the block
    scale: float
    uniform: float


@dataclass(frozen=True, slots=True, eq=False)
class Acceptance:
    """The outcome of one round. `tv`, `kl` are per committed token: how far the law it was drawn from is from p.

    With `recovery` set, `token_ids` ends before the recovered token until `with_recovered` adds it.
    """

    num_accepted: int
    token_ids: IntArray  # [num_accepted + 1]
    tv: FloatArray  # [num_accepted + 1]
    kl: FloatArray  # [num_accepted + 1], nats; inf possible
    target_at_token: FloatArray  # [d] p(y) of each draft token, also behind a rejection
    draft_at_token: FloatArray  # [d] q(y)
    rows: SupportRows  # what was judged
    recovery: Recovery | None = None

    def with_recovered(self, token_id: int) -> Acceptance:
        return replace(self, token_ids=_with(self.token_ids, token_id), recovery=None)

    @property
    def distance(self) -> FloatArray:
        """[d] TV(p, q), also behind a rejection."""
        return self.rows.total_variation


def accept(
    rule: Rule,
    draft_token_ids: IntArray,
    proposals: SparseRows,
    target: TargetRows,
    accept_uniforms: FloatArray,
    target_uniforms: FloatArray,
    limits: TVLimits = NO_LIMITS,
) -> Acceptance:
    """One round of speculative sampling (Leviathan et al. 2023, Algorithm 1; rules: core/rules.py).

    Args:
        draft_token_ids: [d], d = 0 is plain decoding.
        proposals: d rows, the distributions the tokens were drawn from.
        target: rows at the d draft positions and the one after.
        accept_uniforms: [d]; target_uniforms: [d + 1] (for wide targets the draws were already made with them).
        limits: what the request allows per token and in total.

    Raises InvalidRows when a draft token has no probability in its own proposal, or rows do not fit together.
    """
    num_draft = len(draft_token_ids)
    if proposals.num_rows != num_draft or len(target.row_mass) != num_draft + 1:
        raise InvalidRows(
            f"{num_draft} draft tokens came with {proposals.num_rows} proposals and {len(target.row_mass)} target rows"
        )
    at_token = _entries(proposals, draft_token_ids)
    entropy = _entropy(target)[:num_draft] if needs_entropy(rule) else None
    rows = SupportRows.of(proposals, target.rows, target.row_mass, entropy)

    decision = decide(rule, rows, limits)
    num_accepted = sampling.count_accepted(decision.accept_probs[at_token], accept_uniforms)

    uniform = float(target_uniforms[num_accepted])
    if num_accepted == num_draft:
        last = _bonus(target, num_draft, uniform)
    else:
        rejected_prob = float(rows.target_probs[at_token[num_accepted]])
        scale = 1.0 if decision.is_limited[num_accepted] else rule.residual_scale(rejected_prob)
        last = _recovered(rows, proposals, target, Recovery(num_accepted, scale, uniform))

    # Receipt: the law at every reached draft position is the rule's whether its token was accepted or recovered.
    num_reached = min(num_accepted + 1, num_draft)
    bonus_zero = np.zeros(num_accepted + 1 - num_reached)  # a bonus is the target's own
    accepted = draft_token_ids[:num_accepted]
    return Acceptance(
        num_accepted,
        accepted if isinstance(last, Recovery) else _with(accepted, last),
        np.concatenate([decision.tv[:num_reached], bonus_zero]),
        np.concatenate([decision.kl[:num_reached], bonus_zero]),
        rows.target_probs[at_token],
        rows.draft_probs[at_token],
        rows,
        last if isinstance(last, Recovery) else None,
    )


def residual(
    target_ids: IntArray, target_probs: FloatArray, draft_ids: IntArray, draft_probs: FloatArray, scale: float = 1.0
) -> FloatArray:
    """[scale·p - q]+ on the target's support (unnormalised), float64; p itself where that is empty (p = q up to rounding).

    It lives on supp(p) alone, because q > 0 = p gives 0. Ids ascend in both rows.
    """
    at = np.minimum(np.searchsorted(target_ids, draft_ids), len(target_ids) - 1)
    is_there = target_ids[at] == draft_ids
    positive = scale * target_probs
    positive[at[is_there]] -= draft_probs[is_there]
    np.maximum(positive, 0.0, out=positive)
    return positive if positive.sum() > 0.0 else target_probs


def _recovered(rows: SupportRows, proposals: SparseRows, target: TargetRows, wanted: Recovery) -> int | Recovery:
    """The recovered token; `wanted` itself where only the holder of the row can draw it."""
    position = wanted.position
    if not target.is_wide:
        draft_ids, _ = proposals.row(position)
        draft_row = rows.draft_probs[proposals.row_splits[position] :][: len(draft_ids)]
        target_ids, target_row = _target_row(target, position)
        weights = residual(target_ids, target_row, draft_ids, draft_row, wanted.scale)
        return int(target_ids[sampling.draw_index(weights, wanted.uniform)])
    if wanted.scale == 1.0 and target.recovered_token_ids is not None:
        return int(target.recovered_token_ids[position])
    return wanted


def _with(token_ids: IntArray, token_id: int) -> IntArray:
    return np.array([*token_ids.tolist(), token_id], np.int32)


def _bonus(target: TargetRows, position: int, uniform: float) -> int:
    if target.plain_token_ids is not None:
        return int(target.plain_token_ids[position])
    ids, row = _target_row(target, position)
    return int(ids[sampling.draw_index(row, uniform)])


def _target_row(target: TargetRows, position: int) -> tuple[IntArray, FloatArray]:
    """Token ids and law of one row. Rows that no token is drawn from are never touched, however wide they are."""
    ids, probs = target.rows.row(position)
    return ids, probs / target.row_mass[position]


def _entries(proposals: SparseRows, draft_token_ids: IntArray) -> NDArray[np.int64]:
    """Where each draft token stands among its proposal's entries, [d]. Raises InvalidRows if one does not."""
    at = entries_of(proposals, draft_token_ids)
    if at is None:
        raise InvalidRows("a draft token has probability 0 in its own proposal")
    return at


def _entropy(target: TargetRows) -> FloatArray:
    """Entropy of each whole target row, nats [d + 1]."""
    if target.is_wide:
        raise InvalidRequest("the typical rule needs whole target rows; set top_k to at most 256", param="top_k")
    target_probs = target.rows.probs / target.row_mass[target.rows.row_index()]
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(target_probs > 0.0, target_probs * np.log(target_probs), 0.0)
    return -target.rows.row_sums(terms)
