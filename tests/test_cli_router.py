"""`specdiff bench router`: the report's keys, its table, what is refused."""

from __future__ import annotations

import json

import pytest

SMALL = ("bench", "router", "--sessions", 3, "--others", "1", "--seconds", 0.3, "--block", 4)


def test_the_contracts_keys_and_a_picture(specdiff, tmp_path):
    picture = tmp_path / "router.png"
    code, out, err = specdiff(*SMALL, "--quality", '{"speculation": 2}', "--picture", picture, "--json")

    assert code == 0, err
    report = json.loads(out.splitlines()[-1])
    assert report.keys() > {"rounds_per_s", "p99_added_ms", "sessions", "slope_us_per_session"}
    assert report["sessions"] == 3 and report["rounds_per_s"] > 0 and report["p99_added_ms"] > 0
    assert [point["sessions"] for point in report["points"]] == [1, 3]
    assert all(point["verified_per_round"] <= 2 for point in report["points"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_json_there_is_a_table(specdiff):
    code, out, err = specdiff(*SMALL, "--features", 2)
    assert code == 0, err
    assert "p99 added ms" in out and "each further session costs a round" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--others", "1,x"), "--others takes numbers of sessions"),
        (("--others", "0"), "--others takes numbers of sessions"),
        (("--tier", "best"), "unknown quality tier 'best'"),
        (("--quality", '{"speculation": "often"}'), "speculation"),
    ],
)
def test_errors_come_before_anything_runs(specdiff, arguments, message):
    code, out, err = specdiff("bench", "router", *arguments)
    assert (code, out) == (2, "")
    assert message in err.replace("\n", " ")
