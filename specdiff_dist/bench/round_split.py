"""Where a round's time goes, from the records the round loop keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from specdiff_dist.types import CallCost, RoundRecord


@dataclass(frozen=True, slots=True)
class RoundSplit:
    """Medians per round; times in milliseconds. `other_ms` and `non_model_ms` include the time spent queueing."""

    draft_ms: float  # the drafter's forwards
    verify_ms: float  # the verifier's forward
    router_ms: float  # choosing the length, accepting, committing
    wire_ms: float  # both calls as the router saw them, less forward and queue: serialisation, transport, replica shell
    other_ms: float  # the rest of the round
    round_ms: float  # all of it
    non_model_ms: float  # the round less both models' forwards
    non_model_share: float  # non-model time over the verifier's forward time
    bytes_per_round: float  # both calls, both ways, as payload
    num_rounds: int


def split_rounds(rounds: Sequence[RoundRecord]) -> RoundSplit:
    """Medians over `rounds`. Raises ValueError when there are none."""
    if not rounds:
        raise ValueError("no rounds to measure; generate at least one token")
    wire = [_wire_s(record.draft) + _wire_s(record.verify) for record in rounds]
    non_model = [record.wall_s - record.draft.forward_s - record.verify.forward_s for record in rounds]
    other = [rest - wire_s - record.decide_s for record, rest, wire_s in zip(rounds, non_model, wire, strict=True)]
    share = [
        rest / record.verify.forward_s
        for record, rest in zip(rounds, non_model, strict=True)
        if record.verify.forward_s > 0.0
    ]
    return RoundSplit(
        draft_ms=_median_ms([record.draft.forward_s for record in rounds]),
        verify_ms=_median_ms([record.verify.forward_s for record in rounds]),
        router_ms=_median_ms([record.decide_s for record in rounds]),
        wire_ms=_median_ms(wire),
        other_ms=_median_ms(other),
        round_ms=_median_ms([record.wall_s for record in rounds]),
        non_model_ms=_median_ms(non_model),
        non_model_share=median(share) if share else 0.0,
        bytes_per_round=median(_num_bytes(record.draft) + _num_bytes(record.verify) for record in rounds),
        num_rounds=len(rounds),
    )


def _wire_s(cost: CallCost) -> float:
    return max(cost.wall_s - cost.forward_s - cost.queue_s, 0.0)


def _num_bytes(cost: CallCost) -> int:
    return cost.bytes_sent + cost.bytes_received


def _median_ms(seconds: Sequence[float]) -> float:
    return median(seconds) * 1e3
