from __future__ import annotations

import asyncio

import pytest

from deployments.busy import BusyLog
from deployments.open_leases import OpenLeases


def test_the_last_calls_are_kept():
    log = BusyLog(max_intervals=3)
    for start in range(5):
        log.add(start, start + 0.5, num_sessions=start)
    assert log.since(0.0) == [(2, 2.5, 2), (3, 3.5, 3), (4, 4.5, 4)]
    assert log.since(3.5) == [(4, 4.5, 4)]


async def test_work_is_logged_also_when_it_fails():
    leases = OpenLeases()
    with leases.busy(num_sessions=3):
        await asyncio.sleep(0.01)
    with pytest.raises(ZeroDivisionError), leases.busy():
        raise ZeroDivisionError
    (first, second) = leases.busy_log.since(0.0)
    assert first[1] - first[0] >= 0.01 and first[1] <= second[0] <= second[1]
    assert (first[2], second[2]) == (3, 1)
