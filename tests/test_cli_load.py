"""`specdiff bench load`: what is refused before anything starts. What it measures: tests/deployments/test_bench_load.py."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "1,two"], "--concurrency takes positive numbers"),
        (["--concurrency", "0"], "--concurrency takes positive numbers"),
        (["--rate", "-1"], "--rate takes positive numbers"),
        (["--concurrency", "1,2", "--overlap-picture", "x.png"], "one --concurrency"),
        (["--concurrency", "4", "--rate", "1", "--overlap-picture", "x.png"], "one --concurrency"),
        (["--tier", "fast", "--quality", "high"], "the tier is given twice"),
        (["--setting", "max_sessions"], "NAME=VALUE"),
        (["--setting", "max_session=4"], "max_session"),
        (["--setting", "max_sessions=none"], "max_sessions"),
    ],
)
def test_what_cannot_be_measured_is_refused(specdiff, arguments, message):
    code, out, err = specdiff("bench", "load", *arguments)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
