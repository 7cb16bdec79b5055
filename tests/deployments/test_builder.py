"""The application builder, without a cluster."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError
from ray.serve import Application
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as serve_run_builds
from ray.serve._private.build_app import build_app

import deployments
from deployments.settings import AppSettings
from specdiff_dist.errors import InexactConfig


def deployments_of(application: Application) -> dict[str, Any]:
    return {each.name: each for each in build_app(application, name="app").deployments}


def test_serve_run_reaches_the_builder_and_parses_its_arguments():
    application = serve_run_builds(deployments.app, {"drafter": "prompt-lookup", "verifier_replicas": "2"})
    built = deployments_of(application)
    assert set(built) == {"Ingress", "Router", "Verifier", "Drafter"}
    assert built["Verifier"].num_replicas == 2
    settings = built["Router"].init_args[2]
    assert type(settings) is AppSettings and settings.drafter == "prompt-lookup"


def test_a_misspelt_argument_stops_serve_run():
    with pytest.raises(ValidationError, match="drafterr"):
        serve_run_builds(deployments.app, {"drafterr": "prompt-lookup"})


def test_without_a_drafter_there_is_no_drafter_deployment():
    built = deployments_of(deployments.app(AppSettings(drafter="none")))
    assert set(built) == {"Ingress", "Router", "Verifier"}
    assert built["Router"].init_args[1] is None


def test_settings_reach_the_replicas():
    settings = AppSettings(
        dtype="float32",
        max_model_len=512,
        verifier_num_threads=3,
        max_sessions=7,
        drafter_num_gpus=0.5,
        grpc_host="node",
    )
    built = deployments_of(deployments.app(settings))
    verifier, drafter = built["Verifier"], built["Drafter"]
    assert verifier.init_args[0].keywords == {
        "dtype": "float32", "device": "auto", "num_threads": 3, "max_model_len": 512, "max_sessions": 7,
        "max_shared_tokens": 4096,
    }  # fmt: skip
    assert verifier.init_kwargs["grpc_host"] == "node"
    assert verifier.max_ongoing_requests == drafter.max_ongoing_requests == 7  # one lease is one ongoing request
    environment = verifier.ray_actor_options["runtime_env"]["env_vars"]
    assert environment["OMP_NUM_THREADS"] == "3"
    assert int(environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) == int(environment["LRU_CACHE_CAPACITY"]) < 1024
    assert drafter.ray_actor_options["num_gpus"] == 0.5


def test_other_calls_never_queue_behind_answers():
    settings = AppSettings(max_ongoing_requests=10, ingress_replicas=3, router_replicas=2)
    built = deployments_of(deployments.app(settings))
    assert built["Ingress"].max_ongoing_requests > 10
    assert built["Router"].max_ongoing_requests > 15  # half of what three ingresses may ask for


def test_over_handles_calls_find_the_replica_of_their_lease():
    built = deployments_of(deployments.app(AppSettings(transport="handle", max_sessions=7)))
    for role in ("Verifier", "Drafter"):
        options = built[role]
        assert options.init_kwargs["transport"] == "handle" and options.init_kwargs["max_sessions"] == 7
        assert options.max_ongoing_requests == 21  # a lease and a call of each session, and the leases refused
        router = options._deployment_config.request_router_config.get_request_router_class()
        assert router.__name__ == "LeaseRouter"


@pytest.mark.parametrize(
    ("overrides", "trap"),
    [
        ({"leniency": 0.1}, 0),
        ({"effort": {"num_denoising_steps": 2, "reveal_order": "max_prob"}}, 1),
        ({"speculation": {"policy": "confidence_threshold", "threshold": 0.5, "statistic": "token_prob"}}, 2),
    ],
)
def test_an_inexact_exact_tier_refuses_to_start(overrides, trap):
    with pytest.raises(InexactConfig) as error:
        deployments.app(AppSettings(tier_overrides={"exact": overrides}))
    assert error.value.trap == trap


@pytest.mark.parametrize("module", ["deployments.messages", "deployments.settings", "deployments.openai_api.app"])
def test_what_knows_nothing_of_ray_does_not_import_it(module):
    code = f"import sys, {module}; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_the_router_and_the_builder_import_no_model_library():
    code = "import sys, deployments.builder; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
