"""The ingress deployment: HTTP on one side, the router's handle on the other. All HTTP is in openai_api."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import nullcontext

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.handle_stream import HandleStream
from deployments.messages import RouterInfo, pack_call, unpack_item
from deployments.openai_api.admission import Admission
from deployments.openai_api.app import build_api
from deployments.openai_api.backend import ServedModel, ServiceInfo
from deployments.openai_api.errors import unavailable
from deployments.settings import AppSettings
from specdiff_dist.config import DecodeConfig
from specdiff_dist.models import resolve
from specdiff_dist.text import Tokenizer
from specdiff_dist.transport import envelope
from specdiff_dist.types import GenerateRequest, TokenChunk

INFO_TIMEOUT_S = 10.0  # long enough for a router replica to be replaced

# What Serve raises when nobody can take the call at the moment: 503, whoever's child was the busy one.
_NOBODY_THERE = (BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError, RayActorError)


class RouterBackend:
    """The router, as the HTTP layer sees it."""

    def __init__(self, router: DeploymentHandle, *, max_answers: int | None = None) -> None:
        """`max_answers`: how many the router is asked for at a time, so that it always has room for other calls; more wait
        here. A request with n > 1 takes n. None: any number."""
        self._router = router
        self._places = nullcontext() if max_answers is None else asyncio.Semaphore(max_answers)

    async def info(self) -> ServiceInfo:
        """Raises ApiError 503 when no router answers in time."""
        answer = self._router.info.remote()
        try:
            info = envelope.unpack(await asyncio.wait_for(answer, INFO_TIMEOUT_S), RouterInfo)
        except TimeoutError:
            answer.cancel()
            raise unavailable(f"the router did not answer within {INFO_TIMEOUT_S:.0f} s; retry later") from None
        except _NOBODY_THERE as error:
            raise _busy(error) from error
        return ServiceInfo(info.max_model_len, info.verifier.vocab_size, info.drafter)

    async def generate(
        self, request: GenerateRequest, config: DecodeConfig | None, tier: str
    ) -> AsyncGenerator[TokenChunk, None]:
        """See Backend.generate."""
        call = pack_call(request, tier=tier, config=config)
        async with self._places:
            stream = HandleStream(lambda: self._router.generate.options(stream=True).remote(call))
            try:
                await stream.first()  # the router has taken the call, no more
                async for item in stream.rest():
                    yield unpack_item(item)
            except _NOBODY_THERE as error:
                raise _busy(error) from error
            finally:
                # Dropping the reference stops nothing; only this makes the router let go of the session.
                stream.close()


def _busy(error: Exception) -> Exception:
    if isinstance(error, BackPressureError):
        return unavailable("too many requests are waiting; retry later")
    return unavailable("the router is not available at the moment; retry later")


@serve.deployment
@serve.ingress()
class Ingress:
    """One HTTP replica: tokenises prompts and formats answers."""

    def __init__(self, router: DeploymentHandle, settings: AppSettings) -> None:
        """Raises ModelUnavailable when the model's tokenizer cannot be had."""
        folder = resolve(settings.model)
        tokenizer = Tokenizer.load(folder.path)
        self._max_requests = settings.max_ongoing_requests
        self._backend = RouterBackend(router, max_answers=settings.max_ongoing_requests)
        self._model = ServedModel(
            name=settings.served_model_name,
            tokenizer=tokenizer,
            default_sampling=folder.default_sampling,
            has_chat_template=tokenizer.has_chat_template,
            tiers=settings.tiers(),
            default_tier=settings.default_tier,
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve in the replica, once it is constructed."""
        api = build_api(self._backend, self._model)
        api.add_middleware(Admission, max_requests=self._max_requests)
        return api
