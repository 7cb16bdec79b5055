"""`bench speed`: turns and arithmetic on contenders whose times are given; no clock is read here."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specdiff_dist.bench.speed import (
    Answer,
    Rounds,
    Task,
    decode_tokens_per_s,
    measure,
    num_runs,
    rotated,
    rounds_report,
    set_report,
)
from specdiff_dist.errors import InvalidConfig
from specdiff_dist.types import CallCost, RoundRecord

TASKS = [Task(f"prompt {i}", (i, i + 1), i) for i in range(3)]


def record(draft_s: float, verify_s: float) -> RoundRecord:
    return RoundRecord(
        4, 4, 1, CallCost(draft_s, wall_s=draft_s), CallCost(verify_s, wall_s=verify_s), 0.0, draft_s + verify_s, False
    )


def taking(*seconds: float, tokens: tuple[int, ...] = (5, 6, 7, 8), rounds: Rounds | None = None) -> Callable:
    """A contender that takes these times on seeds 0, 1, 2; the first tokens take half of it."""

    def contender(task: Task) -> Answer:
        took = seconds[task.seed]
        return Answer(tokens, took, took / 2, 2, rounds)

    return contender


CONTENDERS = {
    "generate": taking(4.0, 8.0, 12.0),
    "plain": taking(2.0, 2.0, 2.0),
    "prompt_lookup": taking(3.0, 3.0, 3.0, tokens=(5, 6, 7, 9)),
    "drafter a": taking(1.0, 4.0, 1.0, rounds=Rounds(2, (1, 1), 0.5)),
    "drafter b": taking(2.0, 2.0, 2.0, rounds=Rounds(1, (0, 0, 0, 1), 0.0)),
}


def test_everybody_answers_every_prompt_in_rotating_order():
    asked: list[tuple[str, Task]] = []

    def noted(name: str) -> Callable:
        def contender(task: Task) -> Answer:
            asked.append((name, task))
            return CONTENDERS[name](task)

        return contender

    calls: list[int] = []
    sets = {"one": TASKS[:2], "two": TASKS[2:]}
    found = measure(sets, {name: noted(name) for name in CONTENDERS}, 4, progress=lambda: calls.append(1))

    assert len(asked) == len(calls) == num_runs(sets, len(CONTENDERS)) == 25
    turns = [asked[start : start + 5] for start in range(0, 25, 5)]
    assert [{task for _, task in turn} for turn in turns] == [{TASKS[i]} for i in (0, 0, 1, 2, 2)]  # 0 and 2: warm-up
    assert {turn[0][0] for turn in turns} == set(CONTENDERS)  # everybody once begins
    assert all({name for name, _ in turn} == set(CONTENDERS) for turn in turns)
    assert {name: len(answers) for name, answers in found["one"].items()} == dict.fromkeys(CONTENDERS, 2)
    assert [answer.seconds for answer in found["two"]["generate"]] == [12.0]


def test_an_answer_of_another_length_stops_the_measurement():
    with pytest.raises(InvalidConfig, match="plain gave 4 tokens instead of 5"):
        measure({"one": TASKS}, {"plain": CONTENDERS["plain"]}, 5)


def test_the_reports_numbers_by_hand():
    answers = measure({"one": TASKS}, CONTENDERS, 4)["one"]
    report = set_report(answers, {"a": "drafter a", "b": "drafter b"}, is_greedy=True)

    assert report["speedup_vs_generate"] == pytest.approx(24 / 6)  # ratio of totals …
    assert report["median_speedup_vs_generate"] == pytest.approx(4)  # … and of the median prompt: 4, 2, 12
    assert report["speedup_vs_plain"] == pytest.approx(1)
    assert report["speedup_vs_prompt_lookup"] == pytest.approx(9 / 6)
    assert report["tokens_per_s"] == pytest.approx(12 / 6)
    assert report["decode_tokens_per_s"] == pytest.approx(6 / 3)
    assert report["decode_speedup_vs_generate"] == pytest.approx(4)
    assert report["acceptance_length"] == pytest.approx(4 / 2)
    assert report["acceptance_histogram"] == [3, 3]
    assert report["mean_tv"] == pytest.approx(1.5 / 12)
    assert report["greedy_equal"] == 1.0
    assert report["num_prompts"] == 3
    assert report["baselines"]["prompt_lookup"]["greedy_equal"] == 0.0
    assert report["baselines"]["generate"] == {"tokens_per_s": pytest.approx(0.5), "decode_tokens_per_s": 0.5}
    assert report["drafters"]["a"] == {name: report[name] for name in report["drafters"]["a"]}
    assert report["drafters"]["b"]["speedup_vs_generate"] == pytest.approx(4)
    assert report["drafters"]["b"]["acceptance_histogram"] == [0, 0, 0, 3]


def test_a_baseline_that_took_no_part_is_null():
    some = {name: one for name, one in CONTENDERS.items() if name not in ("generate", "prompt_lookup")}
    report = set_report(measure({"one": TASKS}, some, 4)["one"], {"a": "drafter a"}, is_greedy=True)
    assert report["speedup_vs_plain"] == pytest.approx(1)
    for name in (
        "speedup_vs_generate",
        "median_speedup_vs_prompt_lookup",
        "decode_speedup_vs_generate",
        "greedy_equal",
    ):
        assert report[name] is None
    assert set(report["baselines"]) == {"plain"} and report["num_prompts"] == 3


def test_at_a_temperature_nothing_is_said_about_equality():
    answers = measure({"one": TASKS}, CONTENDERS, 4)["one"]
    report = set_report(answers, {"a": "drafter a"}, is_greedy=False)
    assert report["greedy_equal"] is None
    assert "greedy_equal" not in report["baselines"]["plain"]


def test_a_rounds_parts_leave_out_the_rounds_with_the_prompt():
    rounds = Rounds(3, (1, 2), 0.3, (record(9.0, 9.0), record(0.01, 0.04), record(0.03, 0.06)))
    report = rounds_report([Answer((1, 2, 3, 4, 5), 1.0, rounds=rounds)])
    assert (report["draft_ms"], report["verify_ms"], report["round_ms"]) == pytest.approx((20, 50, 70))
    assert report["drafted_per_round"] == 4


def test_over_http_the_parts_are_not_told():
    answers = [Answer((1, 2), 1.0, rounds=Rounds(1, (0, 1), 0.0))]
    report = rounds_report(answers)
    assert report["draft_ms"] is None
    assert report["acceptance_length"] == 2
    assert decode_tokens_per_s(answers) is None


def test_an_answer_that_came_at_once_has_no_decode_speed():
    assert decode_tokens_per_s([Answer((1, 2), 1.0, 1.0, 2)]) is None


def test_rotation():
    assert [rotated(["a", "b", "c"], turn) for turn in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
