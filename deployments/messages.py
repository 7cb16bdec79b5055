"""What crosses Serve handles, as msgpack and never pickle: calls to the router, its chunks or one error, and leases.

Errors travel by kind and text, so that neither side unpickles the other's exceptions and the ingress can tell 400, 503
and 500 apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdiff_dist.config import DecodeConfig
from specdiff_dist.errors import (
    InexactConfig,
    InvalidConfig,
    InvalidRequest,
    InvalidRows,
    SpecdiffError,
    VerifierUnavailable,
)
from specdiff_dist.transport import envelope
from specdiff_dist.types import DrafterInfo, GenerateRequest, TokenChunk, VerifierInfo

_KINDS: tuple[type[SpecdiffError], ...] = (  # the most special first
    InvalidRequest,
    InexactConfig,
    InvalidConfig,
    VerifierUnavailable,
    InvalidRows,
)


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """`config` None: the tier's own."""

    request: GenerateRequest
    tier: str
    config: DecodeConfig | None


@dataclass(frozen=True, slots=True)
class RouterInfo:
    """What the router says about itself."""

    model: str  # the name clients use
    max_model_len: int  # prompt and answer together, in tokens
    verifier: VerifierInfo
    drafter: DrafterInfo | None  # None: off, or not reachable at the moment
    tiers: tuple[str, ...]
    default_tier: str


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """First item of a lease's stream: where the session's rounds go."""

    address: str  # host:port of the replica's gRPC server, or its id in Serve (transport "handle")
    node_id: str  # Ray's id of the machine it is on


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """A SpecdiffError without its class: `kind` is one of _KINDS' names, or SpecdiffError."""

    kind: str
    message: str
    param: str | None
    trap: int | None


@dataclass(frozen=True, slots=True)
class RouterItem:
    """One item of an answer's stream: exactly one field is set.

    The first item is a chunk without tokens: the router has taken the call. An error is the last item.
    """

    chunk: TokenChunk | None
    error: ErrorReport | None


def pack_call(request: GenerateRequest, *, tier: str, config: DecodeConfig | None) -> bytes:
    """The argument of `Router.generate`."""
    return envelope.pack(GenerateCall(request, tier, config))


def unpack_call(data: bytes) -> GenerateCall:
    """Raises InvalidRequest or InvalidConfig for anything malformed."""
    return envelope.unpack(data, GenerateCall)


def pack_chunk(chunk: TokenChunk) -> bytes:
    """An item with a chunk."""
    return envelope.pack(RouterItem(chunk, None))


def pack_error(error: SpecdiffError) -> bytes:
    """An item with an error."""
    kind = next((kind for kind in _KINDS if isinstance(error, kind)), SpecdiffError)
    report = ErrorReport(
        kind.__name__,
        str(error),
        error.param if isinstance(error, InvalidRequest) else None,
        error.trap if isinstance(error, InexactConfig) else None,
    )
    return envelope.pack(RouterItem(None, report))


def unpack_item(data: bytes) -> TokenChunk:
    """The chunk in an item. Raises the error in it: one of _KINDS, or a plain SpecdiffError."""
    item = envelope.unpack(data, RouterItem)
    if item.chunk is not None:
        return item.chunk
    if item.error is None:
        raise SpecdiffError("an item of the router's answer is empty")
    raise _error(item.error)


def _error(report: ErrorReport) -> SpecdiffError:
    if report.kind == InvalidRequest.__name__:
        return InvalidRequest(report.message, param=report.param)
    if report.kind == InexactConfig.__name__:
        return InexactConfig(report.message, trap=report.trap or 0)
    kind = next((kind for kind in _KINDS if kind.__name__ == report.kind), SpecdiffError)
    return kind(report.message)
