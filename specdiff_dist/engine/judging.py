"""The judging half of a round: the verifier's rows, the acceptance rule, and the one draw it may have to send for."""

from __future__ import annotations

from specdiff_dist.core.acceptance import Acceptance, accept
from specdiff_dist.core.rows import FloatArray, SparseRows
from specdiff_dist.core.rules import needs_rows
from specdiff_dist.engine.session import MAX_RESENDS, Session
from specdiff_dist.errors import PrefixMismatch, VerifierUnavailable
from specdiff_dist.roles import Verifier
from specdiff_dist.types import CallCost, DraftBlock, ResolveCall, VerifyCall


async def judge_round(
    session: Session, verifier: Verifier, block: DraftBlock, accept_uniforms: FloatArray, target_uniforms: FloatArray
) -> tuple[Acceptance, CallCost]:
    """Verifies the block (d tokens; 0: plain decoding) and applies the rule. Uniforms: [d] and [d + 1].

    A replica that has less of the session than believed, also one that replaces a lost one in the middle of this, gets
    the rest resent and the round is judged anew with the same numbers.
    """
    sampling = session.request.sampling
    proposals = block.proposals if sampling.may_be_wide else None
    hold_rows = sampling.may_be_wide and block.num_tokens > 0 and needs_rows(session.config.rule)
    for _ in range(MAX_RESENDS):
        prefix = session.state_prefix(session.verifier_cached)
        try:
            verify = VerifyCall(prefix, block.token_ids, sampling, proposals, target_uniforms, hold_rows)
            with session.waiting():
                target = await verifier.verify(verify)
            if not target.is_wide:
                target.rows.check(vocab_size=session.vocab_size, what="target row")
            outcome = accept(
                session.config.rule, block.token_ids, block.proposals, target, accept_uniforms, target_uniforms,
                session.limits,
            )  # fmt: skip
            if outcome.recovery is not None:
                at = outcome.recovery
                row = SparseRows.from_rows([block.proposals.row(at.position)])
                call = ResolveCall(
                    prefix.session_id, prefix.round_index, at.position, at.scale, at.uniform, row
                )  # fmt: skip
                with session.waiting():
                    resolved = await verifier.resolve(call)
                return outcome.with_recovered(resolved.token_id), target.cost + resolved.cost
            return outcome, target.cost
        except PrefixMismatch as less:
            session.verifier_cached = max(min(less.cached_len, prefix.prefix_len - 1), 0)
            session.verifier_rebuilds += session.round_index > 0
    raise VerifierUnavailable("the verifier keeps losing the session's cache; is its session capacity too small?")
