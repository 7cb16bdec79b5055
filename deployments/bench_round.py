"""`specdiff bench round`: the rounds of a workload, through the deployments on this machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.builder import app
from deployments.messages import pack_call, unpack_item
from deployments.router import Router
from deployments.settings import NO_DRAFTER, AppSettings
from specdiff_dist.api import make_request
from specdiff_dist.bench import PairSettings, Workload
from specdiff_dist.models import resolve
from specdiff_dist.text import Tokenizer
from specdiff_dist.types import GenerateRequest, RoundRecord

APP_NAME = "specdiff-bench"


def rounds_through_serve(workload: Workload, pair: PairSettings) -> Iterator[tuple[RoundRecord, ...]]:
    """The rounds of each request. Starts a Ray of its own, without HTTP, and stops it at the end.

    Calls go from this process to the router's handle, so that everything from the router on is what a client's request
    meets; the records are the round loop's own. Raises the errors of specdiff_dist.errors.
    """
    folder = resolve(pair.model)
    tokenizer = Tokenizer.load(folder.path)
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
        serve.run(app(_settings(pair)), name=APP_NAME, route_prefix=None)
        router = serve.get_deployment_handle(Router.name, APP_NAME)
        for prompt in workload.prompts:
            request = make_request(folder, tokenizer, prompt, **workload.options)
            yield _rounds(router, request, workload.tier)
    finally:
        ray.shutdown()  # the cluster is ours alone: what runs in it ends with it


def _rounds(router: DeploymentHandle, request: GenerateRequest, tier: str) -> tuple[RoundRecord, ...]:
    items: Any = router.options(stream=True).generate.remote(pack_call(request, tier=tier, config=None))
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
