"""Our errors <-> gRPC statuses, in one table.

The status is for people and for gRPC's own tools; the ErrorDetail in the trailing metadata says which error it is.
"""

from __future__ import annotations

import grpc

from specdiff_dist.errors import InvalidRequest, SpecdiffError
from specdiff_dist.pb import roles_pb2 as pb
from specdiff_dist.transport.engine_thread import EngineUnavailable
from specdiff_dist.transport.error_detail import Unavailable, detail_of, error_of, parse_detail

DETAIL_KEY = "specdiff-error-bin"

_Kind = pb.ErrorDetail.Kind
_STATUS = {
    _Kind.KIND_INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    _Kind.KIND_INVALID_CONFIG: grpc.StatusCode.INVALID_ARGUMENT,
    _Kind.KIND_PREFIX_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    _Kind.KIND_STALE_ROUND: grpc.StatusCode.ABORTED,
    _Kind.KIND_INVALID_ROWS: grpc.StatusCode.DATA_LOSS,
    _Kind.KIND_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    _Kind.KIND_UNSPECIFIED: grpc.StatusCode.INTERNAL,
}


def to_status(error: SpecdiffError) -> tuple[grpc.StatusCode, pb.ErrorDetail]:
    """What a server answers for `error`."""
    detail = detail_of(error)
    if isinstance(error, EngineUnavailable):
        return grpc.StatusCode.RESOURCE_EXHAUSTED if error.is_busy else grpc.StatusCode.INTERNAL, detail
    return _STATUS[detail.kind], detail


def from_status(error: grpc.aio.AioRpcError, unavailable: Unavailable) -> SpecdiffError:
    """What a client raises for a failed call; `unavailable` is the role's own error for a replica that cannot answer.

    Whatever came without a detail of ours came from gRPC itself, that is, from a replica that is away, late or broken.
    """
    detail = _detail(error)
    if detail is not None:
        return error_of(detail, unavailable)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in (error.details() or ""):
        return InvalidRequest(f"the replica refused the size of the call: {error.details()}")
    return unavailable(f"no answer: {error.code().name}: {error.details()}")


def _detail(error: grpc.aio.AioRpcError) -> pb.ErrorDetail | None:
    for key, value in error.trailing_metadata() or ():
        if key == DETAIL_KEY and isinstance(value, bytes):
            return parse_detail(value)
    return None
