"""What counts as known from an evaluation set."""

from __future__ import annotations

import pytest

from specdiff_dist.train.contamination import EvaluationTexts, normalised_words

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("What is two plus two?", "exact"),
        ("  what is TWO plus two", "exact"),
        ("What is two plus two now?", None),
        (f"Before it: {LONG.upper()}, and after.", "shingle"),
        ("one two three four five six seven eight nine ten, eleven; twelve thirteen", "shingle"),
        ("one two three four five six seven eight nine ten eleven twelve", None),
        ("nothing of it", None),
    ],
)
def test_reasons(text, reason):
    assert EvaluationTexts(["What is two plus two?", LONG]).reason(text) == reason


def test_nothing_is_known_without_evaluation_texts():
    assert EvaluationTexts().reason("") is None
    assert EvaluationTexts(["?!"]).reason("...") is None


def test_words_are_compared_without_their_form():
    assert normalised_words("Ｔhe ﬁrst, “quoted” ﹩5.") == ["the", "first", "quoted", "5"]
