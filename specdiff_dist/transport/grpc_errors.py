"""Our errors <-> gRPC statuses, in one table.

The status is for people and for gRPC's own tools; the ErrorDetail in the trailing metadata says which error it is.
"""

from __future__ import annotations

import grpc
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

DETAIL_KEY = "specdiff-error-bin"
MAX_MESSAGE_CHARS = 1000  # trailing metadata is limited to 8 KiB

Unavailable = type[DrafterUnavailable] | type[VerifierUnavailable]

_Kind = pb.ErrorDetail.Kind
_TABLE: tuple[tuple[type[SpecdiffError], pb.ErrorDetail.Kind, grpc.StatusCode], ...] = (
    (InvalidRequest, _Kind.KIND_INVALID_REQUEST, grpc.StatusCode.INVALID_ARGUMENT),
    (InvalidConfig, _Kind.KIND_INVALID_CONFIG, grpc.StatusCode.INVALID_ARGUMENT),
    (PrefixMismatch, _Kind.KIND_PREFIX_MISMATCH, grpc.StatusCode.FAILED_PRECONDITION),
    (StaleRound, _Kind.KIND_STALE_ROUND, grpc.StatusCode.ABORTED),
    (InvalidRows, _Kind.KIND_INVALID_ROWS, grpc.StatusCode.DATA_LOSS),
    (DrafterUnavailable, _Kind.KIND_UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
    (VerifierUnavailable, _Kind.KIND_UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
    (EngineUnavailable, _Kind.KIND_UNAVAILABLE, grpc.StatusCode.INTERNAL),
)


def to_status(error: SpecdiffError) -> tuple[grpc.StatusCode, pb.ErrorDetail]:
    """What a server answers for `error`."""
    kind, status = next(
        ((kind, status) for error_type, kind, status in _TABLE if isinstance(error, error_type)),
        (_Kind.KIND_UNSPECIFIED, grpc.StatusCode.INTERNAL),
    )
    if isinstance(error, EngineUnavailable) and error.is_busy:
        status = grpc.StatusCode.RESOURCE_EXHAUSTED
    detail = pb.ErrorDetail(kind=kind, message=str(error)[:MAX_MESSAGE_CHARS])
    if isinstance(error, PrefixMismatch):
        detail.cached_len = error.cached_len
    if isinstance(error, InvalidRequest):
        detail.param = error.param or ""
    return status, detail


def from_status(error: grpc.aio.AioRpcError, unavailable: Unavailable) -> SpecdiffError:
    """What a client raises for a failed call; `unavailable` is the role's own error for a replica that cannot answer.

    Whatever came without a detail of ours came from gRPC itself, that is, from a replica that is away, late or broken.
    """
    detail = _detail(error)
    if detail is None:
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in (error.details() or ""):
            return InvalidRequest(f"the replica refused the size of the call: {error.details()}")
        return unavailable(f"no answer: {error.code().name}: {error.details()}")
    if detail.kind == _Kind.KIND_PREFIX_MISMATCH:
        return PrefixMismatch(detail.cached_len)
    if detail.kind == _Kind.KIND_INVALID_REQUEST:
        return InvalidRequest(detail.message, param=detail.param or None)
    for error_type, kind, _ in _TABLE:
        if kind == detail.kind != _Kind.KIND_UNAVAILABLE:
            return error_type(detail.message)
    return unavailable(detail.message)


def _detail(error: grpc.aio.AioRpcError) -> pb.ErrorDetail | None:
    for key, value in error.trailing_metadata() or ():
        if key == DETAIL_KEY and isinstance(value, bytes):
            try:
                return pb.ErrorDetail.FromString(value)
            except DecodeError:
                return None
    return None
