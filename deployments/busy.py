"""When an engine was at work: its last calls, for pictures and for operators."""

from __future__ import annotations

from collections import deque

MAX_INTERVALS = 16_384  # of the last calls; minutes of a busy replica, and about 2 MB

BusyInterval = tuple[float, float, int]
"""Start and end in seconds of the machine's monotonic clock, and the number of sessions in that forward."""


class BusyLog:
    """The last intervals. Written in the engine's thread, read in the event loop.

    Replicas on one machine share its monotonic clock, so their intervals compare; those of two machines do not.
    """

    def __init__(self, max_intervals: int = MAX_INTERVALS) -> None:
        self._intervals: deque[BusyInterval] = deque(maxlen=max_intervals)

    def add(self, start_s: float, end_s: float, num_sessions: int) -> None:
        """A call that has just ended."""
        self._intervals.append((start_s, end_s, num_sessions))

    def since(self, start_s: float) -> list[BusyInterval]:
        """The intervals that ended after `start_s`, oldest first."""
        return [each for each in self._intervals.copy() if each[1] > start_s]  # a copy: the other thread appends
