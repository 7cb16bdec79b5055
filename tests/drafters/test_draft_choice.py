"""What one session learns about copying and drafting, and what it chooses."""

from __future__ import annotations

import numpy as np
import pytest

from specdiff_dist.drafters.draft_choice import (
    COPY,
    DIFFUSION,
    LONGEST_MATCH,
    LOOKUP_RATES,
    NOTHING,
    PRIOR_STRENGTH,
    TRY_EVERY,
    DraftChoice,
    Match,
    Rates,
    copied,
    find_match,
)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_the_longest_match_is_found_and_of_equal_ones_the_most_recent():
    assert find_match(ids(1, 2, 3, 50, 51, 9, 3, 60, 1, 2, 3)) == Match(3, 3)
    assert find_match(ids(7, 8, 20, 7, 8, 30, 0, 7, 8)) == Match(2, 5)
    assert find_match(ids(1, 2, 3)).size == 0
    assert find_match(ids(1)).size == 0
    assert find_match(ids(4, 4)) == Match(1, 1)
    assert find_match(ids(*range(20), *range(20))).size == LONGEST_MATCH


def test_matches_agree_with_the_plainest_search():
    rng = np.random.default_rng(0)
    for _ in range(300):
        text = rng.integers(0, 3, rng.integers(1, 30)).astype(np.int32)
        best = Match(0, len(text))
        for at in range(1, len(text)):
            size = 0
            while size < min(at, LONGEST_MATCH) and text[at - 1 - size] == text[len(text) - 1 - size]:
                size += 1
            if size and size >= best.size:
                best = Match(size, at)
        assert find_match(text) == best


def test_a_copy_goes_round_at_the_end():
    text = ids(5, 6, 5, 6)
    assert copied(text, find_match(text), 5).tolist() == [5, 6, 5, 6, 5]
    assert copied(text, find_match(text), 5).dtype == np.int32


def test_rates_begin_with_the_prior_and_follow_what_is_seen():
    rates = Rates((0.2, 0.4))
    assert rates.of(0, 4).tolist() == pytest.approx([0.2, 0.4, 0.4, 0.4])
    rates.observe(0, True)
    assert rates.of(0, 1)[0] == pytest.approx((1 + 0.2 * PRIOR_STRENGTH) / (1 + PRIOR_STRENGTH))
    for _ in range(500):
        rates.observe(7, False)  # beyond the last kind: counts for it
    assert rates.of(1, 1)[0] < 0.05
    assert rates.of(0, 1)[0] > 0.2


def lookup_rate(choice: DraftChoice, size: int) -> float:
    return float(choice.lookup_rates(Match(size, 0), 1)[0])


def test_the_prompt_teaches_nothing_and_the_answer_does():
    choice = DraftChoice()
    repeating = ids(*[1, 2, 3, 4] * 8)
    choice.learn(repeating)
    assert lookup_rate(choice, LONGEST_MATCH) == pytest.approx(LOOKUP_RATES[-1])
    choice.learn(np.concatenate([repeating, repeating]))
    assert lookup_rate(choice, LONGEST_MATCH) > 0.95


def test_the_same_call_again_teaches_nothing():
    choice = DraftChoice()
    choice.learn(ids(1, 2))
    choice.drafted(ids(1, 2), ids(), ids(5))
    choice.learn(ids(1, 2, 1, 2))
    before = lookup_rate(choice, 1), choice._diffusion.of(0, 1)[0]
    choice.learn(ids(1, 2, 1, 2))
    assert (lookup_rate(choice, 1), choice._diffusion.of(0, 1)[0]) == before


def test_drafted_blocks_are_judged_up_to_the_first_token_that_did_not_come():
    choice = DraftChoice(diffusion_rates=(0.5, 0.5, 0.5))
    choice.learn(ids(1))
    choice.drafted(ids(1), ids(7), ids(8, 9))  # in two calls of one round
    choice.learn(ids(1, 7, 5, 9))
    hit, miss, untold = choice._diffusion.of(0, 3)
    assert (hit, miss, untold) == pytest.approx(
        ((1 + 0.5 * PRIOR_STRENGTH) / (1 + PRIOR_STRENGTH), 0.5 * PRIOR_STRENGTH / (1 + PRIOR_STRENGTH), 0.5)
    )


def test_a_copy_that_pays_is_chosen_and_stays_chosen_for_its_round():
    choice = DraftChoice(diffusion_rates=(0.4,), draft_cost=0.1)
    text = ids(*[1, 2, 3, 4, 5, 6, 7, 8, 9] * 2)
    assert choice.of_round(text, 4) == COPY
    assert choice.of_round(ids(*range(9)), 4) == DIFFUSION  # nothing to copy
    good = DraftChoice(diffusion_rates=(0.95,), draft_cost=0.1)
    assert good.of_round(ids(1, 2, 1), 4) == DIFFUSION  # a match of one token
    assert DraftChoice(diffusion_rates=(0.95,), draft_cost=9.0).of_round(ids(1, 2, 1), 4) == COPY  # dear drafts

    choice = DraftChoice(diffusion_rates=(0.4,), draft_cost=0.1)
    choice.learn(text)
    assert choice.of_round(text, 4) == COPY
    choice._lookup = Rates((0.0,) * LONGEST_MATCH)
    assert choice.of_round(text, 4) == COPY  # asked again in the same round
    assert choice.of_round(ids(*text, 1), 4) == DIFFUSION


def test_nothing_is_drafted_where_neither_pays_but_tried_again_now_and_then():
    choice = DraftChoice(diffusion_rates=(0.2,), draft_cost=0.2)
    text = list(range(50))
    found = [choice.of_round(ids(*text[:length]), 4) for length in range(1, 40)]
    assert [index for index, one in enumerate(found) if one != NOTHING] == [TRY_EVERY - 1, 2 * TRY_EVERY - 1]
    assert set(found) == {NOTHING, DIFFUSION}
    assert choice.of_round(ids(*text[:39]), 4) == choice.of_round(ids(*text[:39]), 4)
    dear = DraftChoice(
        diffusion_rates=(0.9,), draft_cost=0.0, token_cost=0.95
    )  # a machine where every row costs a token
    assert dear.of_round(ids(1, 2, 1, 2), 4) == NOTHING
