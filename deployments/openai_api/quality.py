"""Where a request says its quality tier: body field > model suffix > header > the deployment's default.

A more specific place wins; that another place said something else is reported as a warning. Every tier named anywhere
must exist, so that a typo is never served as something else.
"""

from __future__ import annotations

from collections.abc import Mapping

from deployments.openai_api.backend import ServedModel
from specdiff_dist.config import DecodeConfig
from specdiff_dist.errors import InvalidRequest
from specdiff_dist.quality import check_tier, resolve_quality
from specdiff_dist.types import DrafterInfo

TIER_HEADER = "x-quality-tier"


def requested_quality(
    body_quality: object,
    *,
    suffix: str | None,
    header: str | None,
    model: ServedModel,
    drafter: DrafterInfo | None,
    greedy_draft: bool,
    is_seeded: bool,
) -> tuple[str, DecodeConfig, list[str]]:
    """The tier, its configuration with the body's overrides, and warnings.

    Raises InvalidRequest (`param`: quality…, model or x-quality-tier) and InexactConfig.
    """
    is_object = isinstance(body_quality, Mapping)
    in_body = body_quality.get("tier") if is_object else body_quality
    stated: list[tuple[str, str]] = []
    for place, name in (("quality", in_body), ("model", suffix), (TIER_HEADER, header)):
        if isinstance(name, str):  # other types in the body are resolve_quality's to refuse
            check_tier(name, model.tiers, param="quality.tier" if is_object and place == "quality" else place)
            stated.append((place, name))
    warnings: list[str] = []
    outer_tier = model.default_tier
    if stated:
        winner, tier = stated[0]
        if winner != "quality":
            outer_tier = tier
        warnings = [
            f"tier {name!a} of {place} ignored: {winner} says {tier!a}" for place, name in stated[1:] if name != tier
        ]
    if body_quality is not None and not isinstance(body_quality, str | Mapping):
        raise InvalidRequest("quality must be a tier name or an object", param="quality")
    tier, config = resolve_quality(
        body_quality, default_tier=outer_tier, tiers=model.tiers, drafter=drafter, greedy_draft=greedy_draft,
        is_seeded=is_seeded,
    )  # fmt: skip
    return tier, config, warnings
