from __future__ import annotations

import pytest
from pydantic import ValidationError

from deployments.settings import AppSettings
from specdiff_dist.config import TIERS, Lenience


def test_the_defaults_fit_two_cores_with_every_deployment():
    settings = AppSettings()
    cpus = (
        settings.verifier_num_cpus * settings.verifier_replicas
        + settings.drafter_num_cpus * settings.drafter_replicas
        + settings.router_num_cpus * settings.router_replicas
        + settings.ingress_num_cpus * settings.ingress_replicas
    )
    assert cpus <= 1.0
    assert settings.tiers() == TIERS


def test_command_line_values_are_strings():
    settings = AppSettings.model_validate(
        {"verifier_replicas": "2", "max_model_len": "512", "tier_overrides": '{"fast": {"leniency": 0.3}}'}
    )
    assert (settings.verifier_replicas, settings.max_model_len) == (2, 512)
    assert settings.tiers()["fast"].rule == Lenience(0.3)
    assert settings.tiers()["turbo"] == TIERS["turbo"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("drafters", "diffusion", "Extra inputs are not permitted"),
        ("verifier_replicas", 0, "greater than or equal to 1"),
        ("transport", "carrier pigeon", "grpc"),
        ("default_tier", "best", "default_tier must be one of exact, high"),
        ("tier_overrides", {"best": {}}, "tier_overrides names 'best'"),
        ("tier_overrides", {"fast": {"lenience": 0.3}}, "unknown field 'lenience' in tier_overrides.fast"),
        ("tier_overrides", {"fast": {"leniency": 1.5}}, "must be in [0, 1]"),
        ("tier_overrides", "{fast", "JSON"),
        ("lease_timeout_s", 0, "greater than 0"),
    ],
)
def test_a_wrong_setting_is_named(field, value, message):
    with pytest.raises(ValidationError) as error:
        AppSettings.model_validate({field: value})
    assert field in str(error.value) or field in message
    assert message in str(error.value)


def test_clients_see_the_models_name_and_no_path(tmp_path):
    assert AppSettings().served_model_name == "smollm2-135m"
    assert AppSettings(model="org/name").served_model_name == "org/name"
    (tmp_path / "my-model").mkdir()
    assert AppSettings(model=str(tmp_path / "my-model")).served_model_name == "my-model"
    assert AppSettings(model="x", served_model_name="y").served_model_name == "y"


def test_no_drafter_is_a_choice():
    assert not AppSettings(drafter="none").has_drafter
    assert AppSettings().has_drafter
