"""How many answers are made at a time. Whoever comes on top is told to come back at once, and never queued unseen."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.openai_api.errors import unavailable


class Admission:
    """ASGI middleware: at most `max_requests` POST requests inside, 503 with Retry-After for the others.

    A request is inside until the last byte of its answer is sent. GET requests (health, models) are always let through.
    """

    def __init__(self, app: ASGIApp, *, max_requests: int) -> None:
        self._app = app
        self._max_requests = max_requests
        self._num_inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._num_inside >= self._max_requests:
            error = unavailable(f"{self._num_inside} requests are being answered already; retry later")
            await error.response()(scope, receive, send)
            return
        self._num_inside += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_inside -= 1
