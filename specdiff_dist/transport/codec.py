"""Types <-> protobuf bytes, exact to the bit.

Decoding trusts no length (tensors.py). What the values must satisfy beyond that is the business of checks.py. What is wrong with a call raises InvalidRequest, with a reply InvalidRows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from specdiff_dist.config import Effort
from specdiff_dist.core.calibration import CalibrationTable
from specdiff_dist.core.rows import SparseRows
from specdiff_dist.errors import InvalidRequest, InvalidRows, SpecdiffError
from specdiff_dist.pb import roles_pb2 as pb
from specdiff_dist.transport.logits_codec import logprobs_from_pb, logprobs_to_pb, processing_from_pb, processing_to_pb
from specdiff_dist.transport.tensors import Malformed, array_of, tensor_to_pb
from specdiff_dist.types import (
    CallCost,
    DraftBlock,
    DraftCall,
    DrafterInfo,
    PrefixStatement,
    ResolveCall,
    ResolvedToken,
    SamplingParams,
    TargetRows,
    VerifierInfo,
    VerifyCall,
)

SEED_BYTES = 16  # randomness.uniforms keys on 128 bits

MessageT = TypeVar("MessageT", bound=Message)
ValueT = TypeVar("ValueT")


# Calls


def encode_draft_call(call: DraftCall) -> bytes:
    """Raises InvalidRequest when a number does not fit its field."""
    return _encode(
        lambda: pb.DraftRequest(
            prefix=_prefix_to_pb(call.prefix),
            num_draft_tokens=call.num_draft_tokens,
            effort=pb.Effort(
                num_denoising_steps=call.effort.num_denoising_steps,
                reveal_order=call.effort.reveal_order,
                early_reveal=call.effort.early_reveal,
            ),
            sampling=_sampling_to_pb(call.sampling),
            draft_top_k=call.draft_top_k,
            seed=(call.seed & (1 << 8 * SEED_BYTES) - 1).to_bytes(SEED_BYTES, "little"),
            drafted_token_ids=tensor_to_pb(call.drafted_token_ids) if len(call.drafted_token_ids) else None,
            features=None if call.features is None else tensor_to_pb(call.features),
        ),
        InvalidRequest,
    )


def decode_draft_call(data: bytes) -> DraftCall:
    """Raises InvalidRequest, or InvalidConfig for an unknown effort."""
    return _decode(data, pb.DraftRequest, _draft_call_from_pb, InvalidRequest)


def encode_verify_call(call: VerifyCall) -> bytes:
    """Raises InvalidRequest when a number does not fit its field."""
    return _encode(
        lambda: pb.VerifyRequest(
            prefix=_prefix_to_pb(call.prefix),
            draft_token_ids=tensor_to_pb(call.draft_token_ids),
            sampling=_sampling_to_pb(call.sampling),
            proposals=None if call.proposals is None else _rows_to_pb(call.proposals),
            target_uniforms=tensor_to_pb(call.target_uniforms),
            hold_rows=call.hold_rows,
            feature_layers=call.feature_layers,
            feature_start=call.feature_start,
            processing=processing_to_pb(call.processing),
            num_prompt_tokens=call.num_prompt_tokens,
            ending_token_ids=call.ending_token_ids,
            num_logprobs=call.num_logprobs,
        ),
        InvalidRequest,
    )


def decode_verify_call(data: bytes) -> VerifyCall:
    """Raises InvalidRequest."""
    return _decode(data, pb.VerifyRequest, _verify_call_from_pb, InvalidRequest)


def encode_resolve_call(call: ResolveCall) -> bytes:
    """Raises InvalidRequest when a number does not fit its field."""
    return _encode(
        lambda: pb.ResolveRequest(
            session_id=call.session_id,
            round_index=call.round_index,
            position=call.position,
            scale=call.scale,
            uniform=call.uniform,
            proposal=_rows_to_pb(call.proposal),
        ),
        InvalidRequest,
    )


def decode_resolve_call(data: bytes) -> ResolveCall:
    """Raises InvalidRequest."""
    return _decode(
        data,
        pb.ResolveRequest,
        lambda message: ResolveCall(
            message.session_id, message.round_index, message.position, message.scale, message.uniform,
            _rows_from_pb(message.proposal),
        ),
        InvalidRequest,
    )  # fmt: skip


def encode_release(session_id: str) -> bytes:
    return _encode(lambda: pb.ReleaseRequest(session_id=session_id), InvalidRequest)


def decode_release(data: bytes) -> str:
    """Raises InvalidRequest."""
    return _decode(data, pb.ReleaseRequest, lambda message: message.session_id, InvalidRequest)


# Replies


def encode_draft_block(block: DraftBlock) -> bytes:
    return _encode(
        lambda: pb.DraftReply(
            token_ids=tensor_to_pb(block.token_ids),
            proposals=_rows_to_pb(block.proposals),
            confidences=tensor_to_pb(block.confidences),
            max_probs=tensor_to_pb(block.max_probs),
            cached_len=block.cached_len,
            cost=_cost_to_pb(block.cost),
        ),
        InvalidRows,
    )


def decode_draft_block(data: bytes) -> DraftBlock:
    """Raises InvalidRows."""
    return _decode(data, pb.DraftReply, _draft_block_from_pb, InvalidRows)


def encode_target_rows(target: TargetRows, proposals: SparseRows | None = None) -> bytes:
    """`proposals`: those of the call. Wide rows stand on their support, which is then not sent back."""
    recovered, plain = target.recovered_token_ids, target.plain_token_ids
    leave_out = target.is_wide and proposals is not None and _same_support(target.rows, proposals)
    return _encode(
        lambda: pb.VerifyReply(
            rows=pb.SparseRows(probs=tensor_to_pb(target.rows.probs)) if leave_out else _rows_to_pb(target.rows),
            row_mass=tensor_to_pb(target.row_mass),
            recovered_token_ids=None if recovered is None else tensor_to_pb(recovered),
            plain_token_ids=None if plain is None else tensor_to_pb(plain),
            cached_len=target.cached_len,
            cost=_cost_to_pb(target.cost),
            features=None if target.features is None else tensor_to_pb(target.features),
            logprobs=logprobs_to_pb(target.logprobs),
        ),
        InvalidRows,
    )


def decode_target_rows(data: bytes, proposals: SparseRows | None = None) -> TargetRows:
    """`proposals`: those of the call. Raises InvalidRows."""
    return _decode(data, pb.VerifyReply, lambda message: _target_rows_from_pb(message, proposals), InvalidRows)


def encode_resolved(resolved: ResolvedToken) -> bytes:
    return _encode(
        lambda: pb.ResolveReply(token_id=resolved.token_id, cost=_cost_to_pb(resolved.cost), logprob=resolved.logprob),
        InvalidRows,
    )


def decode_resolved(data: bytes) -> ResolvedToken:
    """Raises InvalidRows."""
    return _decode(
        data,
        pb.ResolveReply,
        lambda message: ResolvedToken(
            message.token_id, _cost_from_pb(message.cost), message.logprob if message.HasField("logprob") else None
        ),
        InvalidRows,
    )


def encode_drafter_info(info: DrafterInfo) -> bytes:
    return _encode(
        lambda: pb.DrafterInfo(
            name=info.name,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            max_draft_tokens=info.max_draft_tokens,
            reveal_orders=info.reveal_orders,
            is_deterministic=info.is_deterministic,
            reports_true_proposals=info.reports_true_proposals,
            feature_layers=info.feature_layers,
            feature_size=info.feature_size,
            calibration=tensor_to_pb(np.asarray(info.calibration, np.float64)) if info.calibration else None,
        ),
        InvalidRows,
    )


def decode_drafter_info(data: bytes) -> DrafterInfo:
    """Raises InvalidRows."""
    return _decode(
        data,
        pb.DrafterInfo,
        lambda message: DrafterInfo(
            message.name, message.vocab_size, message.max_model_len, message.max_draft_tokens,
            tuple(message.reveal_orders), message.is_deterministic, message.reports_true_proposals,
            tuple(message.feature_layers), message.feature_size, _calibration_from_pb(message),
        ),
        InvalidRows,
    )  # fmt: skip


def encode_verifier_info(info: VerifierInfo) -> bytes:
    return _encode(
        lambda: pb.VerifierInfo(
            name=info.name,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            eos_token_ids=info.eos_token_ids,
            dtype=info.dtype,
            num_layers=info.num_layers,
            hidden_size=info.hidden_size,
        ),
        InvalidRows,
    )


def decode_verifier_info(data: bytes) -> VerifierInfo:
    """Raises InvalidRows."""
    return _decode(
        data,
        pb.VerifierInfo,
        lambda message: VerifierInfo(
            message.name,
            message.vocab_size,
            message.max_model_len,
            tuple(message.eos_token_ids),
            message.dtype,
            message.num_layers,
            message.hidden_size,
        ),
        InvalidRows,
    )


# Messages


def _encode(build: Callable[[], Message], error: type[SpecdiffError]) -> bytes:
    try:
        return build().SerializeToString()
    except (ValueError, Malformed) as reason:  # ValueError: a number beyond its field's range, text beyond Unicode
        raise error(f"cannot be sent: {reason}") from reason


def _decode(
    data: bytes, kind: type[MessageT], build: Callable[[MessageT], ValueT], error: type[SpecdiffError]
) -> ValueT:
    try:
        message = kind()
        message.ParseFromString(data)
        return build(message)
    except (DecodeError, Malformed) as reason:
        raise error(f"malformed {kind.DESCRIPTOR.name}: {reason}") from reason


def _draft_call_from_pb(message: pb.DraftRequest) -> DraftCall:
    if len(message.seed) != SEED_BYTES:
        raise Malformed(f"seed has {len(message.seed)} bytes, not {SEED_BYTES}")
    effort = message.effort
    return DraftCall(
        prefix=_prefix_from_pb(message.prefix),
        num_draft_tokens=message.num_draft_tokens,
        effort=Effort(effort.num_denoising_steps, effort.reveal_order, effort.early_reveal),
        sampling=_sampling_from_pb(message.sampling),
        draft_top_k=message.draft_top_k,
        seed=int.from_bytes(message.seed, "little", signed=True),
        drafted_token_ids=array_of(message, "drafted_token_ids")
        if message.HasField("drafted_token_ids")
        else np.zeros(0, np.int32),
        features=array_of(message, "features") if message.HasField("features") else None,
    )


def _verify_call_from_pb(message: pb.VerifyRequest) -> VerifyCall:
    return VerifyCall(
        prefix=_prefix_from_pb(message.prefix),
        draft_token_ids=array_of(message, "draft_token_ids"),
        sampling=_sampling_from_pb(message.sampling),
        proposals=_rows_from_pb(message.proposals) if message.HasField("proposals") else None,
        target_uniforms=array_of(message, "target_uniforms"),
        hold_rows=message.hold_rows,
        feature_layers=tuple(message.feature_layers),
        feature_start=message.feature_start,
        processing=processing_from_pb(message),
        num_prompt_tokens=message.num_prompt_tokens,
        ending_token_ids=tuple(message.ending_token_ids),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
    )


def _draft_block_from_pb(message: pb.DraftReply) -> DraftBlock:
    return DraftBlock(
        token_ids=array_of(message, "token_ids"),
        proposals=_rows_from_pb(message.proposals),
        confidences=array_of(message, "confidences"),
        max_probs=array_of(message, "max_probs"),
        cached_len=message.cached_len,
        cost=_cost_from_pb(message.cost),
    )


def _target_rows_from_pb(message: pb.VerifyReply, proposals: SparseRows | None) -> TargetRows:
    if proposals is None or message.rows.HasField("row_splits"):
        rows = _rows_from_pb(message.rows)
    else:
        rows = SparseRows(proposals.row_splits, proposals.token_ids, array_of(message.rows, "probs"))
    return TargetRows(
        rows=rows,
        row_mass=array_of(message, "row_mass"),
        recovered_token_ids=array_of(message, "recovered_token_ids")
        if message.HasField("recovered_token_ids")
        else None,
        plain_token_ids=array_of(message, "plain_token_ids") if message.HasField("plain_token_ids") else None,
        cached_len=message.cached_len,
        cost=_cost_from_pb(message.cost),
        features=array_of(message, "features") if message.HasField("features") else None,
        logprobs=logprobs_from_pb(message),
    )


# Parts


def _prefix_to_pb(prefix: PrefixStatement) -> pb.PrefixStatement:
    return pb.PrefixStatement(
        session_id=prefix.session_id,
        round_index=prefix.round_index,
        prefix_len=prefix.prefix_len,
        prefix_crc=prefix.prefix_crc,
        new_token_ids=tensor_to_pb(prefix.new_token_ids),
    )


def _prefix_from_pb(message: pb.PrefixStatement) -> PrefixStatement:
    return PrefixStatement(
        message.session_id,
        message.round_index,
        message.prefix_len,
        message.prefix_crc,
        array_of(message, "new_token_ids"),
    )


def _sampling_to_pb(sampling: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p
    )


def _sampling_from_pb(message: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(message.temperature, message.top_k, message.top_p, message.min_p)


def _cost_to_pb(cost: CallCost) -> pb.CallCost:
    return pb.CallCost(
        forward_s=cost.forward_s,
        queue_s=cost.queue_s,
        num_forwards=cost.num_forwards,
        batch_size=cost.batch_size,
        batch_tokens=cost.batch_tokens,
    )


def _calibration_from_pb(message: pb.DrafterInfo) -> CalibrationTable:
    if not message.HasField("calibration"):
        return ()
    table = array_of(message, "calibration")
    if table.dtype != np.float64 or table.ndim != 2 or len(table) == 0:
        raise Malformed(f"calibration: {table.dtype} {list(table.shape)}")
    return tuple(tuple(row) for row in table.tolist())


def _cost_from_pb(message: pb.CallCost) -> CallCost:
    return CallCost(message.forward_s, message.queue_s, message.num_forwards, message.batch_size, message.batch_tokens)


def _rows_to_pb(rows: SparseRows) -> pb.SparseRows:
    return pb.SparseRows(
        row_splits=tensor_to_pb(rows.row_splits),
        token_ids=tensor_to_pb(rows.token_ids),
        probs=tensor_to_pb(rows.probs),
    )


def _rows_from_pb(message: pb.SparseRows) -> SparseRows:
    return SparseRows(array_of(message, "row_splits"), array_of(message, "token_ids"), array_of(message, "probs"))


def _same_support(rows: SparseRows, others: SparseRows) -> bool:
    return np.array_equal(rows.row_splits, others.row_splits) and np.array_equal(rows.token_ids, others.token_ids)
