"""The FastAPI application: routes, and one place where every failure becomes an OpenAI error object."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from deployments.openai_api.backend import Backend, RecentInfo, ServedModel
from deployments.openai_api.body import MAX_BODY_BYTES, read_json
from deployments.openai_api.choices import (
    ChoiceStream,
    ClientDisconnected,
    collect_choices,
    generate_choices,
    until_disconnect,
)  # fmt: skip
from deployments.openai_api.errors import ApiError, api_error, json_response, unavailable
from deployments.openai_api.generation import Generation, new_request_id, prepare, split_model, unknown_model
from deployments.openai_api.prompts import PromptEncoder
from deployments.openai_api.quality import TIER_HEADER
from deployments.openai_api.requests import ChatBody, CompletionBody, parse_body
from deployments.openai_api.responses import CHAT, COMPLETION, ChunkWriter, Shape
from deployments.openai_api.sse import EventStream, stream_events
from specdiff_dist.types import TokenChunk

HEALTH_TIMEOUT_S = 5.0
WARNING_HEADER = "x-specdiff-warning"
REQUEST_ID_HEADER = "x-request-id"


def build_api(backend: Backend, model: ServedModel, *, max_body_bytes: int = MAX_BODY_BYTES) -> FastAPI:
    """The application that serves `model` through `backend`.

    POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /v1/models/{name}, GET /health.
    """
    app = FastAPI(title="specdiff", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    endpoints = _Endpoints(backend, model, max_body_bytes)
    # Plain routes: bodies are parsed strictly here, so FastAPI's own parsing and its 422 have no say.
    app.add_route("/v1/chat/completions", endpoints.chat, ["POST"])
    app.add_route("/v1/completions", endpoints.completion, ["POST"])
    app.add_route("/v1/models", endpoints.list_models, ["GET"])
    app.add_route("/v1/models/{name:path}", endpoints.get_model, ["GET"])
    app.add_route("/health", endpoints.health, ["GET"])
    app.add_exception_handler(HTTPException, _routing_error)
    return app


class _Endpoints:
    """The handlers, around what they share."""

    def __init__(self, backend: Backend, model: ServedModel, max_body_bytes: int) -> None:
        self._backend = backend
        self._info = RecentInfo(backend)
        self._model = model
        self._encoder = PromptEncoder(model.tokenizer)
        self._max_body_bytes = max_body_bytes

    async def chat(self, request: Request) -> Response:
        request_id = new_request_id("chatcmpl")
        return await _answered(request_id, lambda: self._generate(request, request_id, ChatBody, CHAT))

    async def completion(self, request: Request) -> Response:
        request_id = new_request_id("cmpl")
        return await _answered(request_id, lambda: self._generate(request, request_id, CompletionBody, COMPLETION))

    async def list_models(self, request: Request) -> Response:
        names = [None, *self._model.tiers]
        return json_response({"object": "list", "data": [self._model_object(tier) for tier in names]})

    async def get_model(self, request: Request) -> Response:
        async def found() -> Response:
            name = request.path_params["name"]
            tier = split_model(name, self._model.name)
            if tier is not None and tier not in self._model.tiers:
                raise unknown_model(name, self._model.name)
            return json_response(self._model_object(tier))

        return await _answered("-", found)

    async def health(self, request: Request) -> Response:
        """200 while the router answers and has a verifier; a missing drafter only slows requests down."""

        async def checked() -> Response:
            try:
                info = await asyncio.wait_for(self._backend.info(), HEALTH_TIMEOUT_S)
            except TimeoutError:
                raise unavailable(f"the router did not answer within {HEALTH_TIMEOUT_S:.0f} s") from None
            drafter = None if info.drafter is None else info.drafter.name
            return json_response({"status": "ok", "model": self._model.name, "drafter": drafter})

        return await _answered("health", checked)

    async def _generate(
        self, request: Request, request_id: str, body_model: type[ChatBody] | type[CompletionBody], shape: Shape
    ) -> Response:
        body, warnings = parse_body(body_model, await read_json(request, max_bytes=self._max_body_bytes))
        generation = await prepare(
            body,
            request_id=request_id,
            warnings=warnings,
            tier_header=request.headers.get(TIER_HEADER),
            model=self._model,
            info=await self._info.get(),
            encoder=self._encoder,
        )
        if generation.stream:
            return await self._stream(request, generation, shape)
        choices = await until_disconnect(request, collect_choices(self._backend, generation))
        return json_response(shape.whole(generation, self._model, choices), headers=_headers(generation))

    async def _stream(self, request: Request, generation: Generation, shape: Shape) -> Response:
        items = generate_choices(self._backend, generation)
        try:
            first = await until_disconnect(request, _first(items))
        except BaseException:
            await items.aclose()
            raise
        writer = ChunkWriter(shape, generation, self._model)
        return EventStream(stream_events(generation, writer, first, items), items, _headers(generation))

    def _model_object(self, tier: str | None) -> dict[str, object]:
        name = self._model.name
        return {
            "id": name if tier is None else f"{name}:{tier}",
            "object": "model",
            "created": self._model.created,
            "owned_by": "specdiff",
            "root": name,
            "parent": None if tier is None else name,
        }


async def _first(items: ChoiceStream) -> tuple[int, TokenChunk]:
    return await anext(items)


async def _answered(request_id: str, handle: Callable[[], Awaitable[Response]]) -> Response:
    """The handler's answer, or the error object of what it raised."""
    try:
        return await handle()
    except (ClientDisconnected, ClientDisconnect):
        return Response(status_code=499)  # nobody reads it
    except Exception as error:  # noqa: BLE001 - the boundary: api_error logs what is unexpected
        failure = api_error(error, request_id=request_id)
        failure.headers.setdefault(REQUEST_ID_HEADER, request_id)
        return failure.response()


def _headers(generation: Generation) -> dict[str, str]:
    headers = {REQUEST_ID_HEADER: generation.request_id}
    if generation.warnings:
        headers[WARNING_HEADER] = "; ".join(generation.warnings)
    return headers


async def _routing_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    if not isinstance(error, HTTPException):
        raise error
    message = f"{request.method} {request.url.path[:120]!a}: {error.detail}"
    return ApiError(error.status_code, message, headers=error.headers).response()
