"""Our errors <-> ErrorDetail, what a failed call carries whatever transport it failed over."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from specdiff_dist.errors import (
    DrafterUnavailable,
    InvalidConfig,
    InvalidRequest,
    InvalidRows,
    PrefixMismatch,
    SpecdiffError,
    StaleRound,
    VerifierUnavailable,
)
from specdiff_dist.pb import roles_pb2 as pb
from specdiff_dist.transport.engine_thread import EngineUnavailable

MAX_MESSAGE_CHARS = 1000  # gRPC's trailing metadata is limited to 8 KiB

Unavailable = type[DrafterUnavailable] | type[VerifierUnavailable]

_Kind = pb.ErrorDetail.Kind
_KINDS: tuple[tuple[type[SpecdiffError], pb.ErrorDetail.Kind], ...] = (
    (InvalidRequest, _Kind.KIND_INVALID_REQUEST),
    (InvalidConfig, _Kind.KIND_INVALID_CONFIG),
    (PrefixMismatch, _Kind.KIND_PREFIX_MISMATCH),
    (StaleRound, _Kind.KIND_STALE_ROUND),
    (InvalidRows, _Kind.KIND_INVALID_ROWS),
    (DrafterUnavailable, _Kind.KIND_UNAVAILABLE),
    (VerifierUnavailable, _Kind.KIND_UNAVAILABLE),
    (EngineUnavailable, _Kind.KIND_UNAVAILABLE),
)


def detail_of(error: SpecdiffError) -> pb.ErrorDetail:
    """What a replica answers for `error`."""
    kind = next((kind for error_type, kind in _KINDS if isinstance(error, error_type)), _Kind.KIND_UNSPECIFIED)
    detail = pb.ErrorDetail(kind=kind, message=str(error)[:MAX_MESSAGE_CHARS])
    if isinstance(error, PrefixMismatch):
        detail.cached_len = error.cached_len
    if isinstance(error, InvalidRequest):
        detail.param = error.param or ""
    return detail


def error_of(detail: pb.ErrorDetail, unavailable: Unavailable) -> SpecdiffError:
    """What a client raises for it; `unavailable` is the role's own error for a replica that cannot answer."""
    if detail.kind == _Kind.KIND_PREFIX_MISMATCH:
        return PrefixMismatch(detail.cached_len)
    if detail.kind == _Kind.KIND_INVALID_REQUEST:
        return InvalidRequest(detail.message, param=detail.param or None)
    for error_type, kind in _KINDS:
        if kind == detail.kind != _Kind.KIND_UNAVAILABLE:
            return error_type(detail.message)
    return unavailable(detail.message)


def parse_detail(data: bytes) -> pb.ErrorDetail | None:
    """None for bytes that are no ErrorDetail."""
    try:
        return pb.ErrorDetail.FromString(data)
    except DecodeError:
        return None
