from __future__ import annotations

import math

import numpy as np
import pytest

from specdiff_dist.core.logit_processing import LogitProcessing, count_occurrences
from specdiff_dist.errors import InvalidRequest


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frequency_penalty", 2.1), ("frequency_penalty", math.nan), ("presence_penalty", -2.1),
        ("presence_penalty", math.inf), ("repetition_penalty", 0.0), ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf), ("repetition_penalty", math.nan), ("repetition_penalty", 1e-300),
        ("min_tokens", -1),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(InvalidRequest) as refused:
        LogitProcessing(**{name: value})
    assert refused.value.param == name


@pytest.mark.parametrize(("ids", "biases"), [((1, 1), (0.5, 0.5)), ((1,), ()), ((1,), (100.5,)), ((1,), (math.nan,))])
def test_a_bias_is_one_number_for_one_token(ids, biases):
    with pytest.raises(InvalidRequest) as refused:
        LogitProcessing(bias_token_ids=ids, biases=biases)
    assert refused.value.param == "logit_bias"


def test_ids_outside_the_vocabulary_are_refused():
    for wrong in (-1, 9, 2**31, 2**63):
        with pytest.raises(InvalidRequest, match="logit_bias"):
            LogitProcessing(bias_token_ids=(wrong,), biases=(1.0,)).check_ids(9)
        with pytest.raises(InvalidRequest, match="allowed_token_ids"):
            LogitProcessing(allowed_token_ids=(3, wrong)).check_ids(9)
    LogitProcessing(bias_token_ids=(0, 8), biases=(1.0, -1.0), allowed_token_ids=(0, 8)).check_ids(9)


def test_some_token_must_be_left_before_the_answer_may_end():
    for processing in (LogitProcessing(min_tokens=1, allowed_token_ids=(2,)), LogitProcessing(min_tokens=1)):
        with pytest.raises(InvalidRequest) as refused:
            processing.check_ids(3, (0, 1, 2))
        assert refused.value.param == "min_tokens"
        processing.check_ids(3, (0, 1))
    LogitProcessing(allowed_token_ids=(2,)).check_ids(3, (2,))


def test_what_is_over_is_no_longer_asked_for():
    assert LogitProcessing().after(0) is None
    only = LogitProcessing(min_tokens=3)
    assert [only.after(n) for n in range(5)] == [only, only, only, None, None]
    both = LogitProcessing(presence_penalty=1.0, min_tokens=3)
    assert both.forbids_tokens and both.after(3) == LogitProcessing(presence_penalty=1.0)
    assert not LogitProcessing(presence_penalty=1.0).forbids_tokens


def test_occurrences_before_each_position():
    tokens = np.array([5, 7, 7, 2, 7, 5, 2, 2], np.int32)  # prompt 5 7, output 7 2 7, draft 5 2 2
    occur = count_occurrences(tokens, 2, 4)
    assert occur.token_ids.tolist() == [2, 5, 7]
    assert occur.in_output.tolist() == [[1, 0, 2], [1, 1, 2], [2, 1, 2], [3, 1, 2]]
    assert occur.in_prompt.tolist() == [False, True, True]


def test_no_output_yet():
    occur = count_occurrences(np.array([5, 7], np.int32), 2, 1)
    assert occur.in_output.tolist() == [[0, 0]]
    assert count_occurrences(np.zeros(0, np.int32), 0, 1).in_output.shape == (1, 0)
