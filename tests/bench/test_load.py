"""`bench load`: loops, turns and arithmetic on answers whose times are given."""

from __future__ import annotations

import asyncio

import pytest

from specdiff_dist.bench.load import (
    OFF,
    ON,
    Point,
    Run,
    Streamed,
    closed_loop,
    in_turns,
    open_loop,
    picks,
    poisson_arrivals,
)
from specdiff_dist.bench.load_report import overlap_report, point_report, token_latencies
from specdiff_dist.pictures_load import draw_load, draw_overlap


def answer(
    *chunks: tuple[float, int], prompt: int = 0, sent_s: float = 0.0, tokens: tuple[int, ...] = (), **changes
) -> Streamed:
    token_ids = tokens or tuple(range(sum(count for _, count in chunks)))
    return Streamed(prompt, sent_s, chunks[-1][0] if chunks else sent_s, chunks, token_ids, **changes)


class Service:
    """Answers one request per `second_s`; notes how many it had at once, and what it was asked."""

    def __init__(self, second_s: float = 0.001) -> None:
        self.second_s = second_s
        self.asked: list[tuple[int, str]] = []
        self.num_inside = self.most_inside = 0

    async def ask(self, prompt: int, mode: str) -> Streamed:
        self.asked.append((prompt, mode))
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        await asyncio.sleep(self.second_s)
        self.num_inside -= 1
        return answer((1.0, 2), prompt=prompt)


@pytest.mark.parametrize("concurrency", [1, 3, 8])
async def test_a_closed_loop_keeps_so_many_requests_going(concurrency):
    service = Service()
    run = await closed_loop(service.ask, picks(4, 10), concurrency, ON)
    assert service.most_inside == concurrency
    assert service.asked == [(index % 4, ON) for index in range(10)]
    assert len(run.answers) == 10


async def test_an_open_loop_waits_for_nobody():
    service = Service(second_s=0.05)
    run = await open_loop(service.ask, [0, 1, 2], [0.0, 0.001, 0.002], OFF)
    assert service.most_inside == 3
    assert [each.prompt for each in run.answers] == [0, 1, 2]


def test_poisson_arrivals_have_their_rate_and_repeat():
    arrivals = poisson_arrivals(5.0, 4000, seed=3)
    assert arrivals == sorted(arrivals) == poisson_arrivals(5.0, 4000, seed=3)
    assert arrivals[-1] == pytest.approx(800, rel=0.1)


async def test_on_and_off_alternate_and_so_does_who_is_first():
    order = []

    async def run(mode: str) -> Run:
        order.append(mode)
        return Run((answer((len(order), 1)),))

    on, off = await in_turns(run, 3)
    assert order == [ON, OFF, OFF, ON, ON, OFF]
    assert [each.end_s for each in on] == [1, 4, 5] and [each.end_s for each in off] == [2, 3, 6]


def test_a_chunks_tokens_share_its_gap():
    one = answer((1.0, 3), (2.0, 1), (4.0, 4))
    assert token_latencies(one) == [1.0, 0.5, 0.5, 0.5, 0.5]
    assert sum(token_latencies(one)) == 3.0  # the decoding time


def test_the_points_numbers_by_hand():
    on = [Run((answer((1.0, 4), (2.0, 4)), answer((1.0, 4), (3.0, 4), prompt=1))) for _ in range(2)]
    slow = Run((answer((2.0, 1), (6.0, 7)), answer((2.0, 4), (8.0, 4), prompt=1)))
    fast = Run((answer((2.0, 1), (6.0, 7)), answer((2.0, 4), (4.0, 4), prompt=1)))
    numbers = point_report(Point(tuple(on), (slow, fast), concurrency=2), is_greedy=True)

    assert numbers["concurrency"] == 2 and "rate" not in numbers
    assert numbers["tokens_per_s"] == pytest.approx(16 / 3)
    assert numbers["plain_tokens_per_s_spread"] == [pytest.approx(2.0), pytest.approx(16 / 6)]
    assert numbers["ratio_spread"] == [pytest.approx(2.0), pytest.approx(16 / 3 / 2)]
    assert numbers["ratio"] == pytest.approx((2.0 + 16 / 6) / 2)
    assert numbers["p50_itl_ms"] == pytest.approx(375.0)  # 8 tokens of 250 ms, 8 of 500
    assert numbers["p50_ttft_ms"] == 1000.0 and numbers["plain_p50_ttft_ms"] == 2000.0
    assert numbers["p99_gap_ms"] == pytest.approx(2000.0, rel=0.02)
    assert (numbers["lost"], numbers["retried"], numbers["different"]) == (0, 0, 0)
    assert (numbers["num_requests"], numbers["repeats"]) == (2, 2)


def test_lost_retried_and_different_answers_are_counted_apart():
    whole = answer((1.0, 2), tokens=(5, 6))
    retried = answer((9.0, 2), tokens=(5, 6), num_retries=3)
    broken = answer((1.0, 1), tokens=(5,), failure="the stream broke off")
    silent = answer(failure="status 500")
    other = answer((1.0, 2), tokens=(5, 7))
    point = Point((Run((retried, broken, other)),), (Run((whole, silent, whole)),), rate=1.5)
    numbers = point_report(point, is_greedy=True)
    assert numbers["rate"] == 1.5 and "concurrency" not in numbers
    assert (numbers["lost"], numbers["retried"], numbers["different"]) == (2, 3, 1)
    assert numbers["failures"] == {"the stream broke off": 1, "status 500": 1}
    assert numbers["tokens_per_s"] == pytest.approx(4 / 9)  # a broken answer's tokens are worth nothing
    assert point_report(point, is_greedy=False)["different"] is None


def test_a_point_where_everything_is_lost_has_no_ratio():
    nothing = Run((answer((1.0, 1), failure="status 500"),))
    numbers = point_report(Point((nothing,), (nothing,), concurrency=1), is_greedy=True)
    assert numbers["ratio"] is None and numbers["p99_itl_ms"] is None
    assert numbers["lost"] == 2


def test_overlap_counts_busy_time_inside_the_run_only():
    run = Run((answer((10.0, 1), sent_s=0.0),))
    intervals = {"drafter": [(-1.0, 2.0, 1), (4.0, 6.0, 2)], "verifier": [(2.0, 9.0, 1), (9.5, 12.0, 1)]}
    assert overlap_report(intervals, run) == {
        "drafter_busy_s": 4.0, "verifier_busy_s": 7.5, "wall_s": 10.0, "overlap": 1.15,
    }  # fmt: skip


def test_the_pictures_are_drawn(tmp_path):
    run = Run((answer((10.0, 1)),))
    numbers = [point_report(Point((run,), (run,), concurrency=count), is_greedy=True) for count in (1, 2, 64)]
    draw_load(tmp_path / "load.png", [*numbers, {**numbers[0], "ratio": None, "concurrency": 128}])
    draw_overlap(tmp_path / "overlap.png", {"drafter": [(4.5, 5.0, 1)], "verifier": []}, run, 1.3)
    for name in ("load", "overlap"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
