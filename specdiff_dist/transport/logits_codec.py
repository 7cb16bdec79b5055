"""Logit processing and logprobs <-> protobuf (codec.py has the messages they are part of)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdiff_dist.core.logit_processing import LogitProcessing
from specdiff_dist.core.logprobs import TargetLogprobs
from specdiff_dist.pb import roles_pb2 as pb
from specdiff_dist.transport.tensors import array_of, tensor_to_pb


def processing_to_pb(processing: LogitProcessing | None) -> pb.LogitProcessing | None:
    if processing is None:
        return None
    return pb.LogitProcessing(
        frequency_penalty=processing.frequency_penalty,
        presence_penalty=processing.presence_penalty,
        repetition_penalty=processing.repetition_penalty,
        bias_token_ids=processing.bias_token_ids,
        biases=processing.biases,
        min_tokens=processing.min_tokens,
        allowed_token_ids=processing.allowed_token_ids,
    )


def processing_from_pb(message: pb.VerifyRequest) -> LogitProcessing | None:
    """Raises InvalidRequest on values out of range."""
    if not message.HasField("processing"):
        return None
    stated = message.processing
    return LogitProcessing(
        stated.frequency_penalty,
        stated.presence_penalty,
        stated.repetition_penalty,
        tuple(stated.bias_token_ids),
        tuple(stated.biases),
        stated.min_tokens,
        tuple(stated.allowed_token_ids),
    )


def logprobs_to_pb(logprobs: TargetLogprobs | None) -> pb.TargetLogprobs | None:
    if logprobs is None:
        return None

    def optional(values: NDArray[np.float32] | None) -> pb.Tensor | None:
        return None if values is None else tensor_to_pb(values)

    return pb.TargetLogprobs(
        top_token_ids=tensor_to_pb(logprobs.top_token_ids),
        top=tensor_to_pb(logprobs.top),
        draft=tensor_to_pb(logprobs.draft),
        entries=optional(logprobs.entries),
        recovered=optional(logprobs.recovered),
        plain=optional(logprobs.plain),
    )


def logprobs_from_pb(message: pb.VerifyReply) -> TargetLogprobs | None:
    if not message.HasField("logprobs"):
        return None
    stated = message.logprobs

    def optional(field: str) -> NDArray[np.float32] | None:
        return array_of(stated, field) if stated.HasField(field) else None

    return TargetLogprobs(
        array_of(stated, "top_token_ids"),
        array_of(stated, "top"),
        array_of(stated, "draft"),
        optional("entries"),
        optional("recovered"),
        optional("plain"),
    )
