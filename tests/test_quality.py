"""The `quality` field as a library: tiers, overrides, errors with their JSON path (K32)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdiff_dist.config import TIERS, ConfidenceThreshold, DecodeConfig, Effort, Linear, Lossless, Off, Static
from specdiff_dist.core.speculation import MeasuredLibraSpec
from specdiff_dist.errors import InexactConfig, InvalidRequest
from specdiff_dist.quality import SETTLED, apply_overrides, resolve_quality
from specdiff_dist.receipts import config_report
from specdiff_dist.types import DrafterInfo

DRAFTER = DrafterInfo("toy", 100, 512, 8, ("left_to_right", "max_prob"), False, True)
BASE = DecodeConfig(Linear(0.1), Effort(2), ConfidenceThreshold(0.3, 6))
EXACT = TIERS["exact"]


def resolve(value, *, drafter=DRAFTER, **facts):
    return resolve_quality(value, default_tier="exact", tiers=TIERS, drafter=drafter, **facts)


@pytest.mark.parametrize(
    ("value", "tier"),
    [(None, "exact"), ("fast", "fast"), ({}, "exact"), ({"tier": "turbo"}, "turbo"), ({"tier": None}, "exact"),
     ({"tier": "high", "leniency": None, "effort": None, "tv_budget": None}, "high")],
)  # fmt: skip
def test_tiers(value, tier):
    assert resolve(value) == (tier, TIERS[tier])


def test_the_default_tier_is_the_deployments():
    assert resolve_quality(None, default_tier="fast", tiers=TIERS, drafter=None) == ("fast", TIERS["fast"])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, BASE),
        ({"leniency": 0.3}, DecodeConfig(Linear(0.3), BASE.effort, BASE.policy)),
        ({"leniency": 0}, DecodeConfig(Linear(0.0), BASE.effort, BASE.policy)),
        ({"leniency": 1}, DecodeConfig(Linear(1.0), BASE.effort, BASE.policy)),
        ({"rule": "lossless"}, DecodeConfig(Lossless(), BASE.effort, BASE.policy)),
        ({"rule": "lossless", "leniency": 0.0}, DecodeConfig(Lossless(), BASE.effort, BASE.policy)),
        ({"rule": "linear"}, BASE),
        ({"effort": 4}, DecodeConfig(BASE.rule, Effort(4), BASE.policy)),
        ({"effort": {"reveal_order": "entropy"}}, DecodeConfig(BASE.rule, Effort(2, "entropy"), BASE.policy)),
        (
            {"effort": {"num_denoising_steps": 3, "reveal_order": "max_prob", "early_reveal": "one_hot"}},
            DecodeConfig(BASE.rule, Effort(3, "max_prob", "one_hot"), BASE.policy),
        ),
        ({"speculation": 0}, DecodeConfig(BASE.rule, BASE.effort, Off())),
        ({"speculation": "off"}, DecodeConfig(BASE.rule, BASE.effort, Off())),
        ({"speculation": 3}, DecodeConfig(BASE.rule, BASE.effort, ConfidenceThreshold(0.3, 3))),
        ({"speculation": "static"}, DecodeConfig(BASE.rule, BASE.effort, Static(6))),
        ({"speculation": {"policy": "static", "length": 2}}, DecodeConfig(BASE.rule, BASE.effort, Static(2))),
        ({"speculation": {"threshold": 0.9}}, DecodeConfig(BASE.rule, BASE.effort, ConfidenceThreshold(0.9, 6))),
        (
            {"speculation": {"statistic": "token_prob", "length": 2}},
            DecodeConfig(BASE.rule, BASE.effort, ConfidenceThreshold(0.3, 2, "token_prob")),
        ),
        ({"draft_temperature": 0}, DecodeConfig(BASE.rule, BASE.effort, BASE.policy, draft_temperature=0.0)),
        ({"draft_top_k": 8}, DecodeConfig(BASE.rule, BASE.effort, BASE.policy, draft_top_k=8)),
    ],
)
def test_overrides(overrides, expected):
    assert apply_overrides(BASE, overrides) == expected


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("nope", "quality"), ("", "quality"), ("FAST", "quality"), (5, "quality"), (True, "quality"), ([], "quality"),
        ({"tier": "nope"}, "quality.tier"), ({"tier": 5}, "quality.tier"), ({"teir": "fast"}, "quality"),
        ({"tier": "fast", "lenience": 0.1}, "quality"),
        ({"rule": "sloppy"}, "quality.rule"), ({"rule": 5}, "quality.rule"),
        ({"leniency": "0.1"}, "quality.leniency"), ({"leniency": True}, "quality.leniency"),
        ({"leniency": -0.1}, "quality.leniency"), ({"leniency": 1.1}, "quality.leniency"),
        ({"leniency": float("nan")}, "quality.leniency"), ({"leniency": float("inf")}, "quality.leniency"),
        ({"leniency": 10**400}, "quality.leniency"),
        ({"rule": "lossless", "leniency": 0.1}, "quality.leniency"),
        ({"effort": 0}, "quality.effort"), ({"effort": 1.0}, "quality.effort"),
        ({"effort": True}, "quality.effort"), ({"effort": "2"}, "quality.effort"), ({"effort": []}, "quality.effort"),
        ({"effort": {"steps": 2}}, "quality.effort"),
        ({"effort": {"num_denoising_steps": 1025}}, "quality.effort.num_denoising_steps"),
        ({"effort": {"num_denoising_steps": 2.0}}, "quality.effort.num_denoising_steps"),
        ({"effort": {"reveal_order": "random"}}, "quality.effort.reveal_order"),
        ({"effort": {"early_reveal": 1}}, "quality.effort.early_reveal"),
        ({"speculation": -1}, "quality.speculation"), ({"speculation": {"length": 257}}, "quality.speculation.length"),
        ({"speculation": 4.0}, "quality.speculation"), ({"speculation": "sometimes"}, "quality.speculation.policy"),
        ({"speculation": {"policy": 5}}, "quality.speculation.policy"),
        ({"speculation": {"policy": "static", "threshold": 0.5}}, "quality.speculation.threshold"),
        ({"speculation": {"policy": "off", "length": 5}}, "quality.speculation.length"),
        ({"speculation": {"policy": "confidence_threshold"}}, "quality.speculation.threshold"),
        ({"speculation": {"policy": "confidence_threshold", "threshold": 2}}, "quality.speculation.threshold"),
        ({"tier": "fast", "speculation": {"statistic": "mood"}}, "quality.speculation.statistic"),
        ({"speculation": {"lenght": 5}}, "quality.speculation"),
        ({"draft_temperature": -1}, "quality.draft_temperature"), ({"draft_top_k": 0}, "quality.draft_top_k"),
        ({"draft_top_k": 1.5}, "quality.draft_top_k"),
        ({"max_tv_per_token": -0.1}, "quality.max_tv_per_token"), ({"tv_budget": "1"}, "quality.tv_budget"),
        ({"rule": "cactus", "leniency": -1}, "quality.leniency"), ({"rule": "lenience", "leniency": 1}, "quality.leniency"),
        ({"tier": "fast", "rule": "cactus"}, "quality.leniency"),  # another rule's leniency is another thing
        ({"speculation": {"policy": "libraspec", "alpha": 0}}, "quality.speculation.alpha"),
        ({"speculation": {"policy": "failfast", "max_length": 1000}}, "quality.speculation.max_length"),
        # what the drafter cannot do is refused, not bent
        ({"tier": "fast", "speculation": 9}, "quality.speculation.length"),
        ({"tier": "fast", "effort": {"reveal_order": "entropy"}}, "quality.effort.reveal_order"),
    ],
)  # fmt: skip
def test_errors_say_where(value, param):
    with pytest.raises(InvalidRequest) as caught:
        resolve(value)
    assert caught.value.param == param


def test_an_unknown_tier_lists_the_tiers():
    with pytest.raises(InvalidRequest, match="exact, high, balanced, fast, turbo"):
        resolve("lossless")


def test_a_policy_without_length_cannot_start_from_off():
    with pytest.raises(InvalidRequest) as caught:
        apply_overrides(DecodeConfig(policy=Off()), {"speculation": "static"})
    assert caught.value.param == "quality.speculation.length"


def test_paths_start_where_the_caller_says():
    with pytest.raises(InvalidRequest) as caught:
        apply_overrides(BASE, {"effort": 0}, param="tier_overrides.fast")
    assert caught.value.param == "tier_overrides.fast.effort"


TRAPS = [
    ({"leniency": 0.1}, 0),
    ({"rule": "linear", "leniency": 0.1}, 0),
    ({"effort": {"num_denoising_steps": 2, "reveal_order": "max_prob"}}, 1),
    ({"speculation": {"policy": "confidence_threshold", "threshold": 0.5, "statistic": "token_prob"}}, 2),
]


@pytest.mark.parametrize(("overrides", "trap"), TRAPS)
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("drafter", [DRAFTER, None])
def test_exact_stays_exact_named_or_by_default(overrides, trap, named, drafter):
    value = {"tier": "exact", **overrides} if named else overrides
    with pytest.raises(InexactConfig) as caught:
        resolve(value, drafter=drafter)
    assert caught.value.trap == trap
    assert resolve({"tier": "high", **overrides}, drafter=drafter)[0] == "high"  # elsewhere it is a choice


@pytest.mark.parametrize("overrides", [overrides for overrides, trap in TRAPS if trap])
def test_greedy_drafts_disarm_the_traps(overrides):
    assert resolve(overrides, greedy_draft=True)[0] == "exact"
    assert resolve({**overrides, "draft_temperature": 0})[0] == "exact"


@pytest.mark.parametrize(
    "overrides",
    [{"leniency": 0}, {"rule": "linear", "leniency": 0.0}, {"effort": 4}, {"speculation": 8}, {"speculation": "off"},
     {"effort": {"num_denoising_steps": 2, "reveal_order": "max_prob", "early_reveal": "one_hot"}},
     {"speculation": {"policy": "confidence_threshold", "threshold": 0.5}}],
)  # fmt: skip
def test_what_keeps_the_promise_is_allowed_on_exact(overrides):
    tier, config = resolve({"tier": "exact", **overrides})
    assert tier == "exact"
    assert config.rule.leniency == 0.0


def test_a_drafter_that_misreports_its_proposals_is_refused_on_exact():
    with pytest.raises(InexactConfig) as caught:
        resolve("exact", drafter=DrafterInfo("liar", 100, 512, 8, ("left_to_right",), False, False))
    assert caught.value.trap == 3


@pytest.mark.parametrize(
    "config", [*TIERS.values(), BASE, DecodeConfig(policy=Off(), draft_temperature=0.5, draft_top_k=7)]
)
@pytest.mark.parametrize("base", [EXACT, BASE, DecodeConfig(policy=Off())])
def test_the_config_of_a_receipt_can_be_sent_back(config, base):
    assert apply_overrides(base, config_report(config)) == config


def test_a_seed_that_is_to_fix_a_sampled_text_keeps_the_clock_out_of_it():
    assert resolve(None) == ("exact", EXACT)
    assert resolve(None, is_seeded=True) == ("exact", replace(EXACT, policy=SETTLED))
    assert resolve(None, is_seeded=True, greedy_draft=True) == ("exact", EXACT)  # one text, however it is drafted
    named = resolve({"speculation": "libraspec_measured"}, is_seeded=True)[1]
    assert isinstance(named.policy, MeasuredLibraSpec)
    assert resolve("fast", is_seeded=True) == ("fast", TIERS["fast"])


def test_more_effort_in_the_exact_tier_settles_the_length():
    assert resolve({"effort": 2})[1] == replace(EXACT, effort=Effort(2), policy=SETTLED)
    assert resolve({"effort": 2}, greedy_draft=True)[1] == replace(EXACT, effort=Effort(2))
    with pytest.raises(InexactConfig, match="trap 1"):
        resolve({"effort": {"num_denoising_steps": 2, "reveal_order": "max_prob"}})
    with pytest.raises(InexactConfig, match="trap 2"):
        resolve({"effort": 2, "speculation": "libraspec_measured"})
