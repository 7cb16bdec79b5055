"""The round loop: draft → choose length → verify → accept → commit.

It runs unchanged in the router, in-process, in tests and in benchmarks; who the roles are is the caller's business.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from time import perf_counter

from specdiff_dist.config import DecodeConfig
from specdiff_dist.core.costs import SharedForward
from specdiff_dist.core.features import check_features
from specdiff_dist.core.randomness import Purpose, uniforms
from specdiff_dist.core.speculation import Knowledge, learn
from specdiff_dist.engine.ahead import DraftAhead
from specdiff_dist.engine.drafting import draft_round, told_drafter
from specdiff_dist.engine.judging import judge_round
from specdiff_dist.engine.recording import round_trace
from specdiff_dist.engine.session import Session
from specdiff_dist.engine.stopping import Detokenizer
from specdiff_dist.errors import DrafterUnavailable
from specdiff_dist.roles import Drafter, Verifier
from specdiff_dist.simulate.trace import RoundTrace
from specdiff_dist.types import CallCost, DrafterInfo, GenerateRequest, RoundRecord, TokenChunk


async def decode(
    request: GenerateRequest,
    config: DecodeConfig,
    drafter: Drafter | None,
    verifier: Verifier,
    *,
    tier: str,
    detokenizer: Detokenizer | None = None,
    knowledge: Knowledge | None = None,
    recorder: Callable[[RoundTrace], None] | None = None,
) -> AsyncGenerator[TokenChunk, None]:
    """Yields one chunk per round; the last has `finish_reason` and `receipt`. Releases both sessions however it ends.

    Args:
        tier: only reported.
        detokenizer: None: chunks carry token ids and no text (stop strings need one).
        knowledge: what policies have learned so far from this drafter and verifier (`Knowledge.for_session`); None:
            nothing yet.
        recorder: told of every round (`specdiff simulate` replays such traces).

    Raises InvalidRequest, or InvalidConfig for a drafter that needs features this verifier does not give, before the first
    chunk; VerifierUnavailable and InvalidRows at any time. A failing drafter
    never fails the request: its rounds are decoded plainly and the receipt says `degraded`.
    """
    knowledge = knowledge or Knowledge()
    drafter = told_drafter(drafter, config.policy, knowledge)
    drafter_info = await _info(drafter)
    verifier_info = await verifier.info()
    check_features(drafter_info, verifier_info)
    session = Session(request, config, tier, verifier_info, drafter_info, detokenizer, knowledge)
    ahead = None
    if config.draft_ahead and drafter is not None and drafter_info is not None:
        ahead = DraftAhead(session, drafter, drafter_info)
    try:
        while session.finish_reason is None:
            started, session.waited_s = perf_counter(), 0.0
            position = session.num_committed  # of the first token this round decides

            drafted = await draft_round(session, drafter, drafter_info, ahead)
            block = drafted.block.head(drafted.length)
            was_ahead = None
            if ahead is not None:
                was_ahead = ahead.settle()
                ahead.ask(block, drafted.guess)
            accept_uniforms = uniforms(request.seed, Purpose.ACCEPT, position, block.num_tokens)
            target_uniforms = uniforms(request.seed, Purpose.TARGET, position, block.num_tokens + 1)
            outcome, logprobs, verify_cost = await judge_round(
                session, verifier, block, accept_uniforms, target_uniforms
            )

            token_ids, text = session.commit(outcome, block.num_tokens)
            learn(
                config.policy, session.knowledge, drafted.block.statistics, block.num_tokens, outcome.num_accepted,
                draft_s=_share_s(drafted.block.cost) if drafted.num_calls else None,
            )  # fmt: skip
            # The first round's calls carry the prompt, and the first draft call its features.
            if session.round_index > (2 if session.feature_layers else 1):
                draft_cost = drafted.block.cost
                session.knowledge.costs.observe(
                    0 if drafted.block.is_local else drafted.block.num_tokens, draft_cost.wall_s, block.num_tokens, verify_cost.wall_s,
                    draft_shared=_shared(draft_cost), verify_shared=_shared(verify_cost),
                )  # fmt: skip

            wall_s = perf_counter() - started
            record = RoundRecord(
                drafted.block.num_tokens, block.num_tokens, outcome.num_accepted, drafted.block.cost, verify_cost,
                decide_s=wall_s - session.waited_s, wall_s=wall_s,
                degraded=drafted.failed, drafted_ahead=was_ahead,
            )  # fmt: skip
            if recorder is not None:
                recorder(round_trace(drafted, outcome, accept_uniforms, record))
            finish_reason = session.finish_reason
            receipt = session.receipt() if finish_reason else None
            yield TokenChunk(token_ids, text, finish_reason, receipt, (record,), logprobs[: len(token_ids)])
    finally:
        try:
            if ahead is not None:
                await ahead.close()
        finally:  # also when that is cancelled: a cancelled caller may be cancelled again
            try:
                await verifier.release(request.request_id)
            finally:
                if drafter is not None:
                    await drafter.release(request.request_id)


def _share_s(cost: CallCost) -> float:
    """What the calls took from everybody: their time, waiting for the forwards of others apart, by those who share them."""
    return max(cost.wall_s - cost.queue_s, 0.0) / max(cost.batch_size, 1)


def _shared(cost: CallCost) -> SharedForward | None:
    if not cost.batch_tokens:
        return None
    return SharedForward(cost.forward_s, cost.batch_tokens, cost.batch_size, cost.queue_s)


async def _info(drafter: Drafter | None) -> DrafterInfo | None:
    if drafter is None:
        return None
    try:
        return await drafter.info()
    except DrafterUnavailable:
        return None
