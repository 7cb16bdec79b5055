"""Several policies on one trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdiff_dist.config import DecodeConfig
from specdiff_dist.core.speculation import Additive, FailFast, LibraSpec, MeasuredLibraSpec, Policy, Static
from specdiff_dist.errors import InvalidConfig
from specdiff_dist.quality import apply_overrides, policy_fields
from specdiff_dist.simulate.costs import Costs
from specdiff_dist.simulate.replay import Replay, replay
from specdiff_dist.simulate.trace import RoundTrace, drafted_rounds

Requests = Sequence[Sequence[RoundTrace]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """`replays` by policy name; "static" is the fastest of all static lengths."""

    replays: dict[str, Replay]
    best_static_length: int | None = None  # the fastest
    closest_static_length: int | None = None  # the one with the least mean deviation from the oracle
    closest_static_deviation: float | None = None


def longest(requests: Requests) -> int:
    """Tokens of the longest recorded draft. Raises InvalidConfig when none was recorded."""
    rounds = drafted_rounds(requests) or [one for rounds in requests for one in rounds if one.length]
    if not rounds:
        raise InvalidConfig("the trace holds no drafted round; record one with speculation on")
    return max(one.length for one in rounds)


def compare_all(requests: Requests, costs: Costs, *, leniency: float = 0.0, block: int = 4) -> Comparison:
    """The best static length, found by search, and every adaptive policy; none drafts more than was recorded."""
    limit = longest(requests)
    block = min(block, limit)
    policies: dict[str, Policy] = {
        "additive": Additive(min(4, limit), limit),
        "failfast": FailFast(block=block, max_length=limit),
        "libraspec": LibraSpec(block=block, max_length=limit),
        "libraspec_measured": MeasuredLibraSpec(block=block, max_length=limit),
    }
    statics = [replay(Static(length), requests, costs, leniency=leniency) for length in range(1, limit + 1)]
    fastest = max(range(limit), key=lambda i: statics[i].expected_speedup)
    closest = min(range(limit), key=lambda i: statics[i].mean_abs_deviation)
    adaptive = {name: replay(policy, requests, costs, leniency=leniency) for name, policy in policies.items()}
    return Comparison(
        {"static": statics[fastest], **adaptive}, fastest + 1, closest + 1, statics[closest].mean_abs_deviation
    )


def parse_policy(text: str) -> tuple[str, Policy]:
    """`name` or `name:{"field": value}`, in the language of `quality.speculation`. Raises InvalidRequest, InvalidConfig."""
    given = policy_fields(text, option="--policy")
    config = apply_overrides(DecodeConfig(), {"speculation": given}, param="policy")
    return given["policy"], config.policy
