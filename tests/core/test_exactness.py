"""Which configurations the exact tier admits, and which trap each refusal names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdiff_dist.config import TIERS, ConfidenceThreshold, DecodeConfig, Effort, Linear, Off, Static
from specdiff_dist.core.exactness import check_exact, is_exact
from specdiff_dist.errors import InexactConfig
from specdiff_dist.types import DrafterInfo

SAMPLING = DrafterInfo("d", 100, 100, 16, ("left_to_right", "max_prob"), False, True)
DETERMINISTIC = replace(SAMPLING, is_deterministic=True)
LYING = replace(SAMPLING, reports_true_proposals=False)

TRAP_1 = DecodeConfig(effort=Effort(2, "max_prob", "proposal"))
TRAP_2 = DecodeConfig(policy=ConfidenceThreshold(0.5, 4, "token_prob"))


@pytest.mark.parametrize(
    ("config", "drafter", "trap", "text"),
    [
        (TRAP_1, SAMPLING, 1, "trap 1 .order of reveal."),
        (TRAP_1, None, 1, "trap 1"),
        (DecodeConfig(effort=Effort(3, "token_prob", "proposal")), SAMPLING, 1, "trap 1"),
        (DecodeConfig(effort=Effort(3, "entropy", "proposal")), SAMPLING, 1, "trap 1"),
        (TRAP_2, SAMPLING, 2, "trap 2 .selection by a sampled token's own confidence."),
        (TRAP_2, None, 2, "trap 2"),
        (DecodeConfig(), LYING, 3, "trap 3 .the proposal reported must be the proposal drawn from."),
        (DecodeConfig(rule=Linear(0.1)), SAMPLING, 0, "leniency 0"),
    ],
)
def test_refusals_name_the_trap(config: DecodeConfig, drafter: DrafterInfo | None, trap: int, text: str) -> None:
    with pytest.raises(InexactConfig, match=text) as caught:
        check_exact(config, drafter)
    assert caught.value.trap == trap
    assert not is_exact(config, drafter)


@pytest.mark.parametrize(
    ("config", "drafter"),
    [
        (DecodeConfig(), SAMPLING),
        (DecodeConfig(effort=Effort(4, "left_to_right", "proposal")), SAMPLING),
        (DecodeConfig(effort=Effort(4, "max_prob", "one_hot")), SAMPLING),
        (DecodeConfig(effort=Effort(1, "max_prob", "proposal")), SAMPLING),
        (DecodeConfig(policy=ConfidenceThreshold(0.5, 4, "max_prob")), SAMPLING),
        (replace(TRAP_1, draft_temperature=0.0), SAMPLING),
        (replace(TRAP_2, draft_temperature=0.0), SAMPLING),
        (TRAP_1, DETERMINISTIC),
        (TRAP_2, DETERMINISTIC),
        (replace(TRAP_1, policy=Off()), SAMPLING),
        (DecodeConfig(rule=Linear(0.0), policy=Static(3)), None),
    ],
)
def test_admitted(config: DecodeConfig, drafter: DrafterInfo | None) -> None:
    check_exact(config, drafter)


def test_greedy_requests_are_exact_at_any_effort_and_policy() -> None:
    assert is_exact(TRAP_1, SAMPLING, greedy_draft=True) and is_exact(TRAP_2, SAMPLING, greedy_draft=True)


def test_the_shipped_exact_tier_is_exact_and_the_others_are_ordered() -> None:
    check_exact(TIERS["exact"], SAMPLING)
    leniency = [TIERS[name].rule.leniency for name in ("exact", "high", "balanced", "fast", "turbo")]
    assert leniency == sorted(leniency) and leniency[0] == 0.0
