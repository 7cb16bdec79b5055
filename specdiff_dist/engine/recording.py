"""A round as a trace keeps it: what the decisions saw and what it cost; no token, no text."""

from __future__ import annotations

from specdiff_dist.core.acceptance import Acceptance
from specdiff_dist.core.rows import FloatArray
from specdiff_dist.engine.drafting import Drafted
from specdiff_dist.simulate.trace import RoundTrace
from specdiff_dist.types import RoundRecord


def round_trace(drafted: Drafted, outcome: Acceptance, accept_uniforms: FloatArray, record: RoundRecord) -> RoundTrace:
    """The trace of a round that submitted the first `drafted.length` tokens of its block."""
    statistics = drafted.block.head(drafted.length).statistics
    return RoundTrace(
        token_probs=statistics.token_probs,
        max_probs=statistics.max_probs,
        sum_squares=statistics.sum_squares,
        target_at_token=outcome.target_at_token,
        draft_at_token=outcome.draft_at_token,
        distance=outcome.distance,
        accept_uniforms=accept_uniforms,
        num_accepted=outcome.num_accepted,
        num_drafted=record.num_drafted,
        num_draft_calls=drafted.num_calls,
        draft_s=record.draft.wall_s,
        verify_s=record.verify.wall_s,
        wall_s=record.wall_s,
    )
