"""The judging half of a round: the verifier's rows, the acceptance rule, and the one draw it may have to send for."""

from __future__ import annotations

import numpy as np

from specdiff_dist.core.acceptance import Acceptance, accept
from specdiff_dist.core.logprobs import TokenLogprob, committed_logprobs
from specdiff_dist.core.rows import FloatArray, SparseRows
from specdiff_dist.core.rules import needs_rows
from specdiff_dist.engine.session import Session
from specdiff_dist.errors import InvalidRows, PrefixMismatch, VerifierUnavailable
from specdiff_dist.roles import Verifier
from specdiff_dist.session_prefix import MAX_RESENDS
from specdiff_dist.types import CallCost, DraftBlock, ResolveCall, ResolvedToken, TargetRows, VerifyCall


async def judge_round(
    session: Session, verifier: Verifier, block: DraftBlock, accept_uniforms: FloatArray, target_uniforms: FloatArray
) -> tuple[Acceptance, tuple[TokenLogprob, ...], CallCost]:
    """Verifies the block (d tokens; 0: plain decoding) and applies the rule. Uniforms: [d] and [d + 1]. The logprobs are
    those of the outcome's tokens, () if the request asked for none.

    A replica that has less of the session than believed, also one that replaces a lost one in the middle of this, gets
    the rest resent and the round is judged anew with the same numbers.
    """
    sampling, layers = session.request.sampling, session.feature_layers
    proposals = block.proposals if sampling.may_be_wide else None
    hold_rows = sampling.may_be_wide and block.num_tokens > 0 and needs_rows(session.config.rule)
    for _ in range(MAX_RESENDS):
        try:
            cost = await _prefill(session, verifier, block.num_tokens)
            prefix = session.state_prefix(session.verifier_prefix_len)
            verify = VerifyCall(
                prefix, block.token_ids, sampling, proposals, target_uniforms, hold_rows, layers,
                session.num_featured if layers else 0, num_logprobs=session.request.num_logprobs,
                **session.asked_of_logits,
            )  # fmt: skip
            with session.waiting():
                target = await verifier.verify(verify)
            cost += target.cost
            if not target.is_wide:
                target.rows.check(vocab_size=session.vocab_size, what="target row")
            outcome = accept(
                session.config.rule, block.token_ids, block.proposals, target, accept_uniforms, target_uniforms,
                session.limits,
            )  # fmt: skip
            resolved = None
            if outcome.recovery is not None:
                at = outcome.recovery
                row = SparseRows.from_rows([block.proposals.row(at.position)])
                call = ResolveCall(
                    prefix.session_id, prefix.round_index, at.position, at.scale, at.uniform, row
                )  # fmt: skip
                with session.waiting():
                    resolved = await verifier.resolve(call)
                outcome = outcome.with_recovered(resolved.token_id)
                cost += resolved.cost
            session.keep_features(verify, target.features, session.num_committed + outcome.num_accepted)
            return outcome, _logprobs(verify, target, outcome, resolved), cost
        except PrefixMismatch as less:
            session.verifier_cached = max(min(less.cached_len, session.verifier_prefix_len - 1), 0)
            session.verifier_rebuilds += session.round_index > 0
    raise VerifierUnavailable("the verifier keeps losing the session's cache; is its session capacity too small?")


def _logprobs(
    verify: VerifyCall, target: TargetRows, outcome: Acceptance, resolved: ResolvedToken | None
) -> tuple[TokenLogprob, ...]:
    """Of the outcome's tokens, where they were asked for. Raises InvalidRows when a value is missing."""
    if verify.num_logprobs is None:
        return ()
    if target.logprobs is None or (resolved is not None and resolved.logprob is None):
        raise InvalidRows("the verifier sent no logprobs")
    return committed_logprobs(
        target.logprobs, target.rows, outcome.token_ids, None if resolved is None else resolved.logprob
    )


async def _prefill(session: Session, verifier: Verifier, num_draft: int) -> CallCost:
    """Where features are wanted of more tokens than fit into one reply, has the first of them verified alone. Their rows
    are of no use; each such call costs one row of logits. Nearly always there is nothing to do."""
    cost = CallCost()
    if not session.feature_layers:
        return cost
    sampling = session.request.sampling
    while session.num_committed + num_draft - session.num_featured > session.max_new_tokens:
        end = min(session.num_featured + session.max_new_tokens, session.num_committed - 1)
        if end <= session.num_featured:
            break
        call = VerifyCall(
            session.state_prefix(session.verifier_prefix_len, end), np.zeros(0, np.int32), sampling,
            SparseRows.from_rows([]) if sampling.may_be_wide else None, np.zeros(1),
            feature_layers=session.feature_layers, feature_start=session.num_featured,
        )  # fmt: skip
        with session.waiting():
            target = await verifier.verify(call)
        session.keep_features(call, target.features, end)
        session.verifier_cached = max(session.verifier_cached, end)
        cost += target.cost
    return cost
