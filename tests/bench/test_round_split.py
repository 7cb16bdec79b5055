"""The arithmetic of `specdiff bench round`."""

from __future__ import annotations

import pytest

from specdiff_dist.bench import split_rounds
from specdiff_dist.types import CallCost, RoundRecord


def record(*, draft: CallCost, verify: CallCost, decide_s: float, wall_s: float) -> RoundRecord:
    return RoundRecord(4, 4, 2, draft, verify, decide_s, wall_s, degraded=False)


def one_round(scale: float = 1.0) -> RoundRecord:
    """10 ms drafting + 3 ms on the wire; 40 ms verifying + 2 ms queue + 5 ms wire; 1 ms deciding; 63 ms in all."""
    return record(
        draft=CallCost(forward_s=0.010 * scale, wall_s=0.013 * scale, bytes_sent=100, bytes_received=200),
        verify=CallCost(
            forward_s=0.040 * scale, queue_s=0.002 * scale, wall_s=0.047 * scale, bytes_sent=30, bytes_received=70
        ),
        decide_s=0.001 * scale,
        wall_s=0.063 * scale,
    )


def test_the_parts_of_one_round_add_up_to_it():
    split = split_rounds([one_round()])

    assert split.draft_ms == pytest.approx(10)
    assert split.verify_ms == pytest.approx(40)
    assert split.router_ms == pytest.approx(1)
    assert split.wire_ms == pytest.approx(8)
    assert split.other_ms == pytest.approx(4)  # 2 ms of queue and 2 ms nobody claims
    assert split.non_model_ms == pytest.approx(13)
    assert split.non_model_share == pytest.approx(13 / 40)
    assert split.bytes_per_round == 400
    parts = split.draft_ms + split.verify_ms + split.router_ms + split.wire_ms + split.other_ms
    assert parts == pytest.approx(split.round_ms)


def test_medians_ignore_one_slow_round():
    split = split_rounds([one_round(), one_round(), one_round(100.0)])

    assert split.verify_ms == pytest.approx(40)
    assert split.num_rounds == 3


def test_a_local_round_without_drafting_has_no_wire():
    split = split_rounds(
        [record(draft=CallCost(), verify=CallCost(forward_s=0.04, wall_s=0.04), decide_s=0.0, wall_s=0.041)]
    )

    assert split.draft_ms == 0
    assert split.wire_ms == 0
    assert split.other_ms == pytest.approx(1)
    assert split.bytes_per_round == 0


def test_no_rounds_is_an_error():
    with pytest.raises(ValueError, match="no rounds"):
        split_rounds([])
