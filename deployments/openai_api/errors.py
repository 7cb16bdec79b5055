"""OpenAI error objects: every failure of the HTTP layer, before or inside a stream, is one of these.

    {"error": {"message": …, "type": …, "param": …, "code": …}}

No message carries prompt text, a stack trace or an exception that was not written for clients.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Mapping

from starlette.responses import Response

from specdiff_dist.errors import InexactConfig, InvalidConfig, InvalidRequest, VerifierUnavailable

RETRY_AFTER_S = 5

logger = logging.getLogger(__name__)


class ApiError(Exception):
    """A failure as the client sees it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """OpenAI's error type."""
        if self.status < 500:
            return "invalid_request_error"
        return "service_unavailable_error" if self.status == 503 else "server_error"

    def body(self) -> dict[str, object]:
        """The error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The error as an HTTP response."""
        return json_response(self.body(), status=self.status, headers=self.headers)


def unavailable(message: str) -> ApiError:
    """503: nothing wrong with the request, come back later."""
    return ApiError(503, message, code="service_unavailable", headers={"retry-after": str(RETRY_AFTER_S)})


def api_error(error: Exception, *, request_id: str = "-") -> ApiError:
    """How the client sees `error`. Unexpected errors are logged here, without their message: it may quote the prompt."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        return ApiError(400, str(error), param=error.param, code="invalid_value")
    if isinstance(error, InexactConfig):
        return ApiError(400, str(error), param="quality", code="inexact_config")
    if isinstance(error, InvalidConfig):
        return ApiError(400, str(error), param="quality", code="invalid_config")
    if isinstance(error, VerifierUnavailable):
        return unavailable("no verifier is available at the moment; retry later")
    kind = type(error).__name__
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("request %s failed: %s\n%s", request_id, kind, frames)
    return ApiError(500, f"internal error ({kind}); the request id is {request_id}", code="internal_error")


def dump_json(value: object) -> bytes:
    """Compact UTF-8 JSON. A lone surrogate becomes its escape, which is what JSON calls it; NaN raises ValueError."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", errors="backslashreplace")


def json_response(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`value` as an application/json response."""
    return Response(dump_json(value), status, dict(headers or {}), "application/json")
