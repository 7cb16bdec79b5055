"""Receipts as JSON."""

from __future__ import annotations

import json
import math

from specdiff_dist.config import TIERS
from specdiff_dist.receipts import quality_report, speculative_decoding_metrics, usage_report
from specdiff_dist.types import Receipt


def receipt(**changes):
    values = {
        "tier": "turbo", "config": TIERS["turbo"], "num_rounds": 4, "num_draft_tokens": 16, "num_accepted_tokens": 6,
        "acceptance_histogram": (1, 1, 1, 1), "num_tokens": 10, "mean_tv": 0.1, "max_tv": 0.5, "total_tv": 1.0,
        "mean_kl": 0.2, "num_infinite_kl": 0, "exact": False, "degraded": True, "verifier_rebuilds": 1,
    }  # fmt: skip
    return Receipt(**{**values, **changes})


def test_metrics_have_vllms_names_and_definitions():
    assert speculative_decoding_metrics(receipt()) == {
        "mean_acceptance_length": 2.5,  # recovered and bonus tokens count
        "draft_acceptance_rate": 0.375,
        "acceptance_histogram": [1, 1, 1, 1],
        "num_spec_steps": 4,
        "num_draft_tokens": 16,
        "num_accepted_draft_tokens": 6,
    }


def test_plain_decoding_divides_by_nothing():
    metrics = speculative_decoding_metrics(receipt(num_draft_tokens=0, num_accepted_tokens=0, num_rounds=0))
    assert metrics["draft_acceptance_rate"] == metrics["mean_acceptance_length"] == 0.0


def test_quality_names_what_was_asked_and_measured():
    assert quality_report(receipt()) == {
        "tier": "turbo",
        "config": {
            "rule": "lenience",
            "leniency": 0.8,
            "effort": {"num_denoising_steps": 1, "reveal_order": "left_to_right", "early_reveal": "proposal"},
            "speculation": {"policy": "confidence_threshold", "length": 8, "threshold": 0.4, "statistic": "max_prob"},
            "draft_temperature": None,
            "draft_top_k": 64,
            "draft_ahead": False,
            "max_tv_per_token": None,
            "tv_budget": None,
        },
        "mean_tv": 0.1,
        "max_tv": 0.5,
        "total_tv": 1.0,
        "mean_kl": 0.2,
        "num_infinite_kl": 0,
        "exact": False,
        "degraded": True,
        "verifier_rebuilds": 1,
    }


def test_infinite_kl_is_null_with_a_count_and_everything_is_json():
    report = quality_report(receipt(mean_kl=None, num_infinite_kl=3, mean_tv=math.nan))
    assert (report["mean_kl"], report["num_infinite_kl"], report["mean_tv"]) == (None, 3, None)
    json.dumps([report, speculative_decoding_metrics(receipt())], allow_nan=False)


def test_usage_adds_up():
    assert usage_report(7, 5) == {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
