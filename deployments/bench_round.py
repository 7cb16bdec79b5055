"""`specdiff bench round`: the rounds of a workload, through the deployments on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.bench_app import APP_NAME, running_app
from deployments.messages import pack_call, unpack_item
from deployments.router import Router
from deployments.settings import NO_DRAFTER, AppSettings
from specdiff_dist.api import make_request
from specdiff_dist.bench import PairSettings, Workload
from specdiff_dist.config import DEFAULT_TIER, TIERS
from specdiff_dist.models import resolve
from specdiff_dist.quality import resolve_quality
from specdiff_dist.text import Tokenizer
from specdiff_dist.types import GenerateRequest, RoundRecord


def rounds_through_serve(workload: Workload, pair: PairSettings) -> Iterator[tuple[RoundRecord, ...]]:
    """The rounds of each request. Starts a Ray of its own, without HTTP, and stops it at the end.

    Calls go from this process to the router's handle, so that everything from the router on is what a client's request
    meets; the records are the round loop's own. Raises the errors of specdiff_dist.errors.
    """
    folder = resolve(pair.model)
    tokenizer = Tokenizer.load(folder.path)
    with running_app(_settings(pair), route_prefix=None, proxy_location="Disabled"):
        router = serve.get_deployment_handle(Router.name, APP_NAME)
        for prompt in workload.prompts:
            request = make_request(folder, tokenizer, prompt, **workload.options)
            yield _rounds(router, request, workload)


def _rounds(router: DeploymentHandle, request: GenerateRequest, workload: Workload) -> tuple[RoundRecord, ...]:
    tier, config = resolve_quality(workload.quality, default_tier=DEFAULT_TIER, tiers=TIERS, drafter=None)
    items: Any = router.options(stream=True).generate.remote(pack_call(request, tier=tier, config=config))
    return tuple(record for item in items for record in unpack_item(item).rounds)


def _settings(pair: PairSettings) -> AppSettings:
    settings = AppSettings(
        model=pair.model,
        drafter=NO_DRAFTER if pair.drafter is None else pair.drafter,
        dtype=pair.dtype,
    )
    if pair.num_threads is None:
        return settings
    threads = {"verifier_num_threads": pair.num_threads, "drafter_num_threads": pair.num_threads}
    return settings.model_copy(update=threads)
