"""Where a request names its tier, which place wins, and that exact stays exact (K32)."""

from __future__ import annotations

import pytest

from specdiff_dist.config import TIERS, DecodeConfig, Effort, Linear
from specdiff_dist.types import TokenChunk
from tests.deployments.fake_backend import NAME, FakeBackend, api_client, make_model, make_receipt

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def backend():
    return FakeBackend()


@pytest.fixture
async def client(backend, model):
    async with api_client(backend, model) as client:
        yield client


async def post(client, *, model=NAME, header=None, **fields):
    headers = {} if header is None else {"x-quality-tier": header}
    return await client.post(PATH, json={"model": model, "prompt": "x", **fields}, headers=headers)


@pytest.mark.parametrize(
    ("body", "suffix", "header", "tier"),
    [
        (None, None, None, "exact"),
        (None, None, "turbo", "turbo"),
        (None, "fast", None, "fast"),
        (None, "fast", "turbo", "fast"),
        ("high", None, None, "high"),
        ("high", "fast", None, "high"),
        ("high", None, "turbo", "high"),
        ("high", "fast", "turbo", "high"),
        ({"tier": "high"}, "fast", "turbo", "high"),
        ({"effort": 2}, "fast", "turbo", "fast"),  # an object without tier starts from the next place
        ({"effort": 2}, None, "turbo", "turbo"),
        ({}, None, "turbo", "turbo"),
    ],
)
async def test_body_then_suffix_then_header_then_default(client, backend, body, suffix, header, tier):
    name = NAME if suffix is None else f"{NAME}:{suffix}"
    response = await post(client, model=name, header=header, quality=body)
    assert response.status_code == 200, response.text
    _, config, used = backend.calls[-1]
    assert used == tier
    assert (config is None) == (not body or "effort" not in body)  # None: the router's own row of the table
    if config is not None:
        assert config == DecodeConfig(TIERS[tier].rule, Effort(2), TIERS[tier].policy)
    # what was outvoted is said
    named = {"quality": body.get("tier") if isinstance(body, dict) else body, "model": suffix, "x-quality-tier": header}
    outvoted = [f"tier '{name}' of {place}" for place, name in named.items() if name not in (None, tier)]
    warning = response.headers.get("x-specdiff-warning", "")
    assert [text for text in outvoted if text not in warning] == []
    assert bool(warning) == bool(outvoted)


async def test_places_that_agree_are_no_warning(client):
    response = await post(client, model=f"{NAME}:fast", header="fast", quality={"tier": "fast"})
    assert "x-specdiff-warning" not in response.headers


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"quality": "nope"}, "quality"), ({"quality": ""}, "quality"), ({"quality": 5}, "quality"),
        ({"quality": []}, "quality"), ({"quality": True}, "quality"), ({"quality": {"tier": "nope"}}, "quality.tier"),
        ({"quality": {"tier": 1}}, "quality.tier"), ({"quality": {"teir": "fast"}}, "quality"),
        ({"quality": {"effort": {"steps": 1}}}, "quality.effort"), ({"quality": {"tv_budget": -1}}, "quality.tv_budget"),
        ({"model": f"{NAME}:nope"}, "model"), ({"model": f"{NAME}:"}, "model"), ({"model": f"{NAME}:fast:fast"}, "model"),
        ({"header": "nope"}, "x-quality-tier"), ({"header": ""}, "x-quality-tier"),
        # a typo is a typo even where another place would win
        ({"quality": "fast", "header": "nope"}, "x-quality-tier"), ({"quality": "fast", "model": f"{NAME}:nope"}, "model"),
    ],
)  # fmt: skip
async def test_unknown_tiers_and_malformed_fields_are_400(client, backend, fields, param):
    response = await post(client, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    if "nope" in str(fields):
        assert "exact, high, balanced, fast, turbo" in error["message"]
    assert backend.calls == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"leniency": 0.2}, "leniency 0"),
        ({"rule": "linear", "leniency": 0.2}, "leniency 0"),
        ({"effort": {"num_denoising_steps": 2, "reveal_order": "max_prob"}}, "trap 1"),
        ({"speculation": {"policy": "confidence_threshold", "threshold": 0.5, "statistic": "token_prob"}}, "trap 2"),
    ],
)
@pytest.mark.parametrize("how", ["named", "default", "suffix", "header"])
async def test_no_override_makes_exact_inexact(client, backend, overrides, message, how):
    fields = {
        "named": {"quality": {"tier": "exact", **overrides}},
        "default": {"quality": overrides},
        "suffix": {"quality": overrides, "model": f"{NAME}:exact"},
        "header": {"quality": overrides, "header": "exact"},
    }[how]
    response = await post(client, **fields, temperature=0.8)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("inexact_config", "quality")
    assert message in error["message"]
    assert backend.calls == []


async def test_at_temperature_zero_the_sampling_traps_are_none(client, backend):
    quality = {"effort": {"num_denoising_steps": 2, "reveal_order": "max_prob"}}
    assert (await post(client, quality=quality, temperature=0)).status_code == 200
    assert (await post(client, quality={"leniency": 0.1}, temperature=0)).status_code == 400


async def test_the_response_names_what_was_used(client, backend):
    config = DecodeConfig(Linear(0.2), Effort(3), TIERS["fast"].policy)
    receipt = make_receipt("fast", config, mean_kl=None, num_infinite_kl=1, degraded=True)
    backend.script = [TokenChunk((65,), "A", "stop", receipt)]
    response = (await post(client, quality={"tier": "fast", "effort": 3})).json()
    assert response["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 2.5, "draft_acceptance_rate": 0.375, "acceptance_histogram": [0, 1, 1],
        "num_spec_steps": 2, "num_draft_tokens": 8, "num_accepted_draft_tokens": 3,
    }  # fmt: skip
    quality = response["quality"]
    assert quality["tier"] == "fast"
    assert quality["config"]["effort"]["num_denoising_steps"] == 3
    assert (quality["exact"], quality["degraded"], quality["mean_kl"]) == (False, True, None)
    # and the same configuration can be asked for again
    backend.script = [TokenChunk((65,), "A", "stop", receipt)]
    assert (await post(client, quality={"tier": "fast", **quality["config"]})).status_code == 200
    assert backend.calls[-1][1] == config
