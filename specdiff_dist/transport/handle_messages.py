"""What a Serve handle call of a role gives back, as msgpack: the same bytes that gRPC carries, or the same ErrorDetail."""

from __future__ import annotations

from dataclasses import dataclass

from specdiff_dist.errors import InvalidRequest, SpecdiffError
from specdiff_dist.transport import envelope
from specdiff_dist.transport.error_detail import Unavailable, detail_of, error_of, parse_detail
from specdiff_dist.transport.role_service import RoleService


@dataclass(frozen=True, slots=True)
class HandleReply:
    """One of the two."""

    reply: bytes | None
    error: bytes | None  # an ErrorDetail


async def answer_handle(service: RoleService, method: str, request: bytes) -> bytes:
    """The packed reply to one call. Raises nothing but CancelledError: Ray would pickle it."""
    try:
        return envelope.pack(HandleReply(await service.answer(method, request), None))
    except SpecdiffError as error:
        return envelope.pack(HandleReply(None, detail_of(error).SerializeToString()))


def unpack_reply(data: bytes, unavailable: Unavailable) -> bytes:
    """The serialised reply. Raises the error in it, and `unavailable` for bytes that are neither."""
    try:
        answer = envelope.unpack(data, HandleReply)
    except InvalidRequest as error:
        raise unavailable(f"no answer: {error}") from error
    if answer.reply is not None:
        return answer.reply
    detail = parse_detail(answer.error) if answer.error else None
    if detail is None:
        raise unavailable("no answer: neither a reply nor an error")
    raise error_of(detail, unavailable)
