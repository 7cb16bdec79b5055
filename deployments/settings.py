"""What can be set for a deployment. Every default is here, and is meant for one CPU machine with two cores.

Fields are flat, so that each can be given on the command line: `serve run deployments:app drafter=prompt-lookup`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from deployments.reservations import STEP
from specdiff_dist.config import DEFAULT_TIER, TIERS, DecodeConfig
from specdiff_dist.errors import InvalidRequest
from specdiff_dist.quality import apply_overrides
from specdiff_dist.transport.engine_thread import DEFAULT_MAX_QUEUED as MAX_QUEUED

NO_DRAFTER = "none"

Transport = Literal["grpc", "handle"]
Replicas = Annotated[int, Field(ge=1, le=1000)]
Cpus = Annotated[float, Field(ge=0, le=1024)]
Gpus = Annotated[float, Field(ge=0, le=64)]
Threads = Annotated[int, Field(ge=1, le=1024)]


def _from_json(value: object) -> object:
    """Command-line values are strings."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error


class AppSettings(BaseModel):
    """Settings of one application. Unknown names are refused; InvalidConfig and InvalidRequest become ValidationErrors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # What is served
    model: str = "smollm2-135m"  # verifier: an embedded name, a local folder or a hub id
    served_model_name: str = ""  # what clients call it; default: `model`, or its last part for a folder
    drafter: str = "combined"  # "combined", "diffusion", "prompt-lookup", a folder, or "none": plain decoding
    dtype: str = "auto"  # of the verifier
    drafter_dtype: str = "auto"
    device: str = "auto"  # of both
    max_model_len: Annotated[int, Field(ge=2)] | None = None  # tokens; None: the model's own
    default_tier: str = DEFAULT_TIER
    tier_overrides: Annotated[dict[str, dict[str, Any]], BeforeValidator(_from_json)] = {}
    """Per tier what to change, in the language of a request's `quality` object: {"fast": {"leniency": 0.3}}."""

    # How many, and what each may use. CPUs are what Ray reserves; fractions, so that all fit one small machine.
    verifier_replicas: Replicas = 1
    drafter_replicas: Replicas = 1
    router_replicas: Replicas = 1
    ingress_replicas: Replicas = 1
    verifier_num_cpus: Cpus = 0.4
    drafter_num_cpus: Cpus = 0.4
    router_num_cpus: Cpus = 0.1
    ingress_num_cpus: Cpus = 0.1
    verifier_num_gpus: Gpus = 0
    drafter_num_gpus: Gpus = 0
    verifier_num_threads: Threads = 2  # threads that compute
    drafter_num_threads: Threads = 2

    trace_dir: str | None = None
    """Where each router process writes a trace of its rounds for `specdiff simulate`: numbers, no text, no tokens."""

    # Sessions and leases
    transport: Transport = "grpc"
    """How rounds reach a leased replica. handle: through Serve and Ray instead of a port of the replica's own; slower."""
    grpc_host: str = "auto"
    """Where replicas listen. auto: 127.0.0.1 while the cluster has one machine, else the machine's address; `node`:
    always the machine's address (when machines join later); or an address. The port carries no credentials."""
    kv_cache_tokens: Annotated[int, Field(ge=2)] | None = None
    """Tokens, prompts and answers, that the sessions of a replica may cache together; longer requests get 400, and those that
    do not fit at the moment wait. None: what fits into 40 % of the memory that is free at the start (a drafter: 10 %); give it
    where several replicas share a machine."""
    kv_step_tokens: Annotated[int, Field(ge=1)] = STEP
    """Of an answer to come, reserved at a time. An answer up to this long is never interrupted for want of room; longer ones
    may have to wait, and then have their prompt and answer read anew."""
    max_sessions: Annotated[int, Field(ge=1, le=MAX_QUEUED // 2)] = 16  # per verifier or drafter replica; more wait
    shared_prefix_tokens: Annotated[int, Field(ge=0)] = 4096
    """Of ended sessions' prompts that a verifier keeps for prompts beginning alike; 0: every prompt is read whole."""
    max_ongoing_requests: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Answers being made at a time per ingress replica, those that wait for a verifier included; more get 503 and
    Retry-After."""
    lease_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """How long a session waits for a verifier while none answers, to it or to the sessions before it; then 503."""
    drafter_patience_s: Annotated[float, Field(ge=0, le=60)] = 1.0  # how long the first round waits for a drafter
    health_check_period_s: Annotated[float, Field(gt=0, le=600)] = 1.0  # a dead replica is noticed this late
    max_call_s: Annotated[float, Field(gt=0, le=86400)] = 120.0  # a model call that runs longer: the replica is stuck

    @model_validator(mode="before")
    @classmethod
    def _name(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and not values.get("served_model_name"):
            model = values.get("model", cls.model_fields["model"].default)
            if isinstance(model, str):
                name = Path(model).expanduser().resolve().name if Path(model).expanduser().is_dir() else model
                return {**values, "served_model_name": name}
        return values

    @model_validator(mode="after")
    def _check_tiers(self) -> AppSettings:
        try:
            tiers = self.tiers()
        except InvalidRequest as error:
            raise ValueError(str(error)) from error
        if self.default_tier not in tiers:
            raise ValueError(f"default_tier must be one of {', '.join(tiers)}, not {self.default_tier!r}")
        return self

    @property
    def has_drafter(self) -> bool:
        return self.drafter != NO_DRAFTER

    def tiers(self) -> dict[str, DecodeConfig]:
        """The table of tiers with `tier_overrides` applied. Raises InvalidRequest."""
        unknown = self.tier_overrides.keys() - TIERS.keys()
        if unknown:
            raise InvalidRequest(
                f"tier_overrides names {', '.join(map(repr, sorted(unknown)))}; the tiers are {', '.join(TIERS)}"
            )
        return {
            name: apply_overrides(config, self.tier_overrides.get(name, {}), param=f"tier_overrides.{name}")
            for name, config in TIERS.items()
        }
