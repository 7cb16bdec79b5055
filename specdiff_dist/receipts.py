"""Receipts as JSON: the dicts that HTTP responses and `specdiff generate --json` share.

A config is written in the language of the request's `quality` object (specdiff_dist/quality.py), so the config of a
receipt can be sent back as it is to ask for the same decoding again.
"""

from __future__ import annotations

import math
from dataclasses import asdict

from specdiff_dist.config import DecodeConfig
from specdiff_dist.core.speculation import Policy
from specdiff_dist.quality import policy_name, rule_name
from specdiff_dist.types import Receipt


def policy_report(policy: Policy) -> dict[str, object]:
    """A speculation policy as `quality.speculation` spells it; lengths in tokens."""
    return {"policy": policy_name(policy), **asdict(policy)}


def config_report(config: DecodeConfig) -> dict[str, object]:
    """A decode config as a `quality` object without its tier."""
    effort = config.effort
    return {
        "rule": rule_name(config.rule),
        "leniency": config.rule.leniency,
        "effort": {
            "num_denoising_steps": effort.num_denoising_steps,
            "reveal_order": effort.reveal_order,
            "early_reveal": effort.early_reveal,
        },
        "speculation": policy_report(config.policy),
        "draft_temperature": config.draft_temperature,
        "draft_top_k": config.draft_top_k,
        "draft_ahead": config.draft_ahead,
        "max_tv_per_token": _finite(config.max_tv_per_token),
        "tv_budget": _finite(config.tv_budget),
    }


def speculative_decoding_metrics(receipt: Receipt) -> dict[str, object]:
    """`metrics.speculative_decoding`, with the field names vLLM uses (acceptance length counts the extra token)."""
    return {
        "mean_acceptance_length": receipt.mean_acceptance_length,
        "draft_acceptance_rate": receipt.draft_acceptance_rate,
        "acceptance_histogram": list(receipt.acceptance_histogram),
        "num_spec_steps": receipt.num_rounds,
        "num_draft_tokens": receipt.num_draft_tokens,
        "num_accepted_draft_tokens": receipt.num_accepted_tokens,
    }


def quality_report(receipt: Receipt) -> dict[str, object]:
    """`quality`: what was asked for and how far the answer's law was from the target's (TV in [0, 1], KL in nats)."""
    return {
        "tier": receipt.tier,
        "config": config_report(receipt.config),
        "mean_tv": _finite(receipt.mean_tv),
        "max_tv": _finite(receipt.max_tv),
        "total_tv": _finite(receipt.total_tv),
        "mean_kl": None if receipt.mean_kl is None else _finite(receipt.mean_kl),
        "num_infinite_kl": receipt.num_infinite_kl,
        "exact": receipt.exact,
        "degraded": receipt.degraded,
        "verifier_rebuilds": receipt.verifier_rebuilds,
    }


def usage_report(num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, int]:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }


def _finite(value: float) -> float | None:
    """JSON has no NaN: a value that is not a number is null."""
    return value if math.isfinite(value) else None
