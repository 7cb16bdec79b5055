"""Reading a request body: bounded, strict JSON, one object."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from deployments.openai_api.errors import ApiError

MAX_BODY_BYTES = 8 * 1024 * 1024
_PARSE_INLINE_BYTES = 64 * 1024  # larger bodies are parsed off the event loop, so that other streams go on


@dataclass(frozen=True, slots=True)
class JsonBody:
    """A parsed body. JSON has no NaN or infinities, but naming the field that holds one is kinder than "not JSON":
    they are parsed, validation refuses them by name, and `has_non_finite` catches those in unknown fields."""

    fields: dict[str, Any]
    has_non_finite: bool


async def read_json(request: Request, *, max_bytes: int = MAX_BODY_BYTES) -> JsonBody:
    """The body's JSON object. Raises ApiError 413 (too large) or 400 (not JSON, not an object)."""
    raw = await _read(request, max_bytes)
    if len(raw) > _PARSE_INLINE_BYTES:
        return await asyncio.to_thread(parse_json, raw)
    return parse_json(raw)


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = ApiError(
        413, f"the request body is larger than {max_bytes} bytes; shorten it", code="request_too_large"
    )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def parse_json(raw: bytes) -> JsonBody:
    """Parses one JSON object. Raises ApiError 400."""
    non_finite = False

    def parse_float(text: str) -> float:
        nonlocal non_finite
        value = float(text)
        non_finite = non_finite or not math.isfinite(value)
        return value

    try:
        value = json.loads(raw.decode("utf-8"), parse_float=parse_float, parse_constant=parse_float)
    except UnicodeDecodeError:
        raise ApiError(400, "the request body is not UTF-8", code="invalid_json") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise ApiError(400, f"the request body is not JSON: {error.msg} at {where}", code="invalid_json") from None
    except (ValueError, RecursionError):  # an integer of thousands of digits; thousands of nested brackets
        message = "the request body is not usable JSON: a number is too long or the nesting too deep"
        raise ApiError(400, message, code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the request body must be a JSON object", code="invalid_json")
    return JsonBody(value, non_finite)
