"""`specdiff bench wire`: keys, table, picture; and both transports for real."""

from __future__ import annotations

import json

import pytest

SMALL = ("--num-runs", 4, "--vocab-size", 2000, "--block", 4, "--draft-top-k", 8)


def test_bytes_alone_need_no_ray(specdiff, tmp_path):
    picture = tmp_path / "wire.png"
    done = specdiff("bench", "wire", *SMALL, "--bytes-only", "--picture", picture, "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out.splitlines()[-1])
    assert 0 < report["truncated_bytes_per_round"] <= report["widest_truncated_bytes_per_round"]
    assert report["full_bytes_per_round"] < report["dense_bytes_per_round"] == 2 * 4 * 2000 * 4
    assert "grpc_ms" not in report
    assert all(case["gzip_bytes_per_round"] > 0 and case["codec_ms"] > 0 for case in report["cases"].values())
    assert report["setting"]["block"] == 4
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_json_there_is_a_table(specdiff):
    done = specdiff("bench", "wire", *SMALL, "--bytes-only")
    assert done.code == 0, done.err
    for text in ("bytes a round", "truncated", "full", "features", "dense float32"):
        assert text in done.out


@pytest.mark.ray
def test_both_transports_carry_the_same_rounds(serve_port):
    """On the cluster that is there: the command starts one of its own."""
    import asyncio

    from deployments import bench_wire
    from specdiff_dist.bench.wire import Shape, make_cases

    shape = Shape(vocab_size=2000, block=4, draft_top_k=8)
    cases = make_cases(shape, 4)
    done = []
    with bench_wire.running_roles(shape, cases) as handles:
        times, by_size = asyncio.run(bench_wire.measure_rounds(handles, cases, 4, lambda: done.append(1)))
    assert times.keys() == cases.keys() and len(done) == 4 * len(cases)
    assert all(each["grpc_ms"] > 0 and each["handle_ms"] > 0 for each in times.values())
    assert [row["bytes"] for row in by_size] == list(bench_wire.REFERENCE_SIZES)
