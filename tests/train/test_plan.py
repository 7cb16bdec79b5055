"""The order of answers."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from specdiff_dist.train.plan import MAX_USES, Source, plan, shares


def test_files_share_by_the_root_of_their_size():
    assert shares([400, 100], 0.25) == pytest.approx([0.5, 0.25, 0.25])
    assert shares([100], 0.0) == [1.0, 0.0]
    assert shares([], 0.25) == [1.0]


def test_sources_are_mixed_from_the_start_and_one_that_ends_leaves_its_share_to_the_others():
    sources = [Source(0.6, 1000), Source(0.15, 5), Source(0.25, None)]
    tasks = list(islice(plan(sources, 0), 1000))
    assert [task.number for task in tasks] == list(range(1000))
    first = Counter(task.source for task in tasks[:100])
    assert all(abs(first[source] - 100 * share) <= 1 for source, share in ((0, 0.6), (1, 0.15), (2, 0.25)))
    rest = Counter(task.source for task in tasks[500:])
    assert rest[1] == 0
    assert rest[0] / rest[2] == pytest.approx(0.6 / 0.25, rel=0.02)


def test_every_prompt_is_used_as_often_as_it_may_and_greedily_once():
    tasks = list(plan([Source(1.0, 7)], 3))
    assert Counter(task.prompt for task in tasks) == dict.fromkeys(range(7), MAX_USES)
    assert Counter(task.prompt for task in tasks if task.is_greedy) == dict.fromkeys(range(7), 1)
    assert len({task.prompt for task in tasks[:7]}) == 7


def test_half_is_greedy_as_long_as_no_prompt_was_used_twice():
    tasks = list(islice(plan([Source(0.5, 100), Source(0.5, None)], 0), 200))
    for source in (0, 1):
        assert sum(task.is_greedy for task in tasks if task.source == source) == 50


def test_the_order_is_a_function_of_the_seed():
    def order(seed: int) -> list[int]:
        return [task.prompt for task in islice(plan([Source(1.0, 50)], seed), 50)]

    assert order(1) == order(1)
    assert order(1) != order(2)
