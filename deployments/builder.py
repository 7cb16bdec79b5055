"""Builds the application that `serve run deployments:app` runs.

Without `from __future__ import annotations`, on purpose: Serve reads the type of `args` from the annotation to parse
`key=value` arguments, and as a string it would hand over a plain dict instead.
"""

import sys
from functools import partial
from math import ceil
from typing import Any

from ray.serve import Application

from deployments.drafter import Drafter
from deployments.ingress import Ingress
from deployments.kv_space import KVSpace
from deployments.lease_router import LeaseRouter
from deployments.router import Router
from deployments.settings import AppSettings
from deployments.verifier import Verifier
from specdiff_dist.core.exactness import check_exact
from specdiff_dist.drafters import load_drafter, split_name
from specdiff_dist.models import EMBEDDED_MODEL, resolve
from specdiff_dist.quality import EXACT_TIER
from specdiff_dist.text import Tokenizer
from specdiff_dist.verifiers import load_verifier

KERNEL_CACHE = "256"  # shapes
OTHER_CALLS = 64  # room beside the answers: health, models, refusals; without it they would queue behind the answers


def app(args: AppSettings) -> Application:
    """Ingress → router → verifier and drafter replicas. Raises InexactConfig when the exact tier is not exact."""
    check_exact(args.tiers()[EXACT_TIER], None)  # the router checks again, with what the drafter says about itself
    if args.model == EMBEDDED_MODEL:  # fetched and converted here once, where its progress and errors are seen
        resolve(args.model, progress=lambda stage: print(f"specdiff: {stage}", file=sys.stderr, flush=True))
    verifier = Verifier.options(
        num_replicas=args.verifier_replicas,
        ray_actor_options=_model_resources(args.verifier_num_cpus, args.verifier_num_gpus, args.verifier_num_threads),
        **role_options(args),
    ).bind(
        partial(
            load_verifier, args.model, dtype=args.dtype, device=args.device, num_threads=args.verifier_num_threads,
            max_model_len=args.max_model_len, max_sessions=args.max_sessions, max_shared_tokens=args.shared_prefix_tokens,
        ),
        **_endpoint_options(args),
        kv_space=KVSpace(args.kv_cache_tokens, 0.4, args.shared_prefix_tokens, args.kv_step_tokens),
    )  # fmt: skip
    drafter = None
    if args.has_drafter:
        drafter = Drafter.options(
            num_replicas=args.drafter_replicas,
            ray_actor_options=_model_resources(args.drafter_num_cpus, args.drafter_num_gpus, args.drafter_num_threads),
            **role_options(args),
        ).bind(
            partial(
                load_drafter, split_name(args.drafter)[0], verifier=args.model, dtype=args.drafter_dtype,
                device=args.device, num_threads=args.drafter_num_threads, max_sessions=args.max_sessions,
            ),
            **_endpoint_options(args),
            kv_space=KVSpace(args.kv_cache_tokens, 0.1, step=args.kv_step_tokens),
        )  # fmt: skip
    router = Router.options(
        num_replicas=args.router_replicas,
        max_ongoing_requests=_answers_per_router(args) + OTHER_CALLS,
        health_check_period_s=args.health_check_period_s,
        ray_actor_options={"num_cpus": args.router_num_cpus},
    ).bind(verifier, drafter, args, partial(_load_tokenizer, args.model))
    return Ingress.options(
        num_replicas=args.ingress_replicas,
        max_ongoing_requests=args.max_ongoing_requests + OTHER_CALLS,
        health_check_period_s=args.health_check_period_s,
        ray_actor_options={"num_cpus": args.ingress_num_cpus},
    ).bind(router, args)


def _answers_per_router(args: AppSettings) -> int:
    """What all ingress replicas together may ask of one router replica."""
    return ceil(args.max_ongoing_requests * args.ingress_replicas / args.router_replicas)


def _load_tokenizer(model: str) -> Tokenizer:
    return Tokenizer.load(resolve(model).path)


def role_options(args: AppSettings) -> dict[str, Any]:
    """Serve options of both roles. With gRPC one ongoing request is one session's lease. With the handle transport calls
    are ongoing requests, too, one of each session at a time; the replicas count their leases themselves, and what is left
    over is for those they refuse."""
    options: dict[str, Any] = {
        "max_ongoing_requests": args.max_sessions,
        "health_check_period_s": args.health_check_period_s,
    }
    if args.transport == "handle":
        options["max_ongoing_requests"] = 3 * args.max_sessions
        options["request_router_config"] = {"request_router_class": f"{LeaseRouter.__module__}.{LeaseRouter.__name__}"}
    return options


def _endpoint_options(args: AppSettings) -> dict[str, Any]:
    """What both roles are told about being called."""
    return {
        "transport": args.transport,
        "grpc_host": args.grpc_host,
        "max_sessions": args.max_sessions,
        "max_call_s": args.max_call_s,
    }


def _model_resources(num_cpus: float, num_gpus: float, num_threads: int) -> dict[str, Any]:
    """Ray options of both roles.

    Drafting and verifying of one session alternate, so both may use all cores as long as idle threads sleep instead
    of spinning: hence the wait policies. But a forward has hundreds of places where threads wait for each other for some
    microseconds, and falling asleep there doubles its time: so they spin a little (some 50 µs) first. Ray would otherwise
    set OMP_NUM_THREADS from num_cpus.
    """
    environment = {
        "OMP_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "4000",
        "KMP_BLOCKTIME": "0",
        # oneDNN and torch each keep a compiled kernel per shape of a product. Batches of many sessions have so many shapes
        # that their default of 1024 lets a replica grow for thousands of requests.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": KERNEL_CACHE,
        "LRU_CACHE_CAPACITY": KERNEL_CACHE,
    }
    return {"num_cpus": num_cpus, "num_gpus": num_gpus, "runtime_env": {"env_vars": environment}}
