from __future__ import annotations

import time

import numpy as np
import pytest

from specdiff_dist.config import Effort
from specdiff_dist.drafters import load_drafter
from specdiff_dist.drafters.prompt_lookup import PromptLookupDrafter, look_up
from specdiff_dist.errors import InvalidConfig, InvalidRequest, PrefixMismatch, StaleRound
from specdiff_dist.types import DraftBlock, DraftCall, PrefixStatement, SamplingParams, prefix_crc
from tests.tiny_models import save_verifier, tiny_llama


def found(text: list[int], num_tokens: int, **sizes: int) -> list[int]:
    ngrams = range(sizes.get("max_ngram", 3), sizes.get("min_ngram", 1) - 1, -1)
    return look_up(np.array(text, np.int32), num_tokens, ngrams).tolist()


def test_the_longest_ngram_wins_over_a_more_recent_shorter_one():
    text = [1, 2, 3, 50, 51, 9, 3, 60, 1, 2, 3]
    assert found(text, 2) == [50, 51]
    assert found(text, 2, max_ngram=1) == [60, 1]


def test_of_equal_length_the_most_recent_wins():
    assert found([7, 8, 20, 7, 8, 30, 0, 7, 8], 2) == [30, 0]


def test_a_copy_that_reaches_the_end_goes_round():
    assert found([5, 6, 5, 6, 5, 6], 5) == [5, 6, 5, 6, 5]
    assert found([4, 4], 3) == [4, 4, 4]


def test_no_match_gives_nothing():
    assert found([1, 2, 3, 4], 4) == []
    assert found([1], 4) == []
    assert found([1, 2, 9, 2], 4, min_ngram=2) == []
    assert found([1, 1], 0) == []


def make_drafter(**options: int) -> PromptLookupDrafter:
    return PromptLookupDrafter(vocab_size=100, max_model_len=1000, **options)


def draft(drafter, tokens: list[int], *, cached: int = 0, round_index: int = 0, wanted: int = 4) -> DraftBlock:
    committed = np.array(tokens, np.int32)
    prefix = PrefixStatement("s", round_index, cached, prefix_crc(committed[:cached]), committed[cached:])
    return drafter.draft(DraftCall(prefix, wanted, Effort(), SamplingParams(1.0), 64, 0))


def test_blocks_are_one_hot_copies_of_the_committed_text():
    drafter = make_drafter()
    block = draft(drafter, [1, 2, 3, 4, 1, 2])
    assert block.token_ids.tolist() == [3, 4, 1, 2]
    assert block.token_ids.dtype == np.int32
    assert block.proposals.token_ids.tolist() == [3, 4, 1, 2]
    assert block.proposals.probs.tolist() == [1.0] * 4
    assert block.confidences.tolist() == block.max_probs.tolist() == [1.0] * 4
    assert block.cached_len == 5
    block.proposals.check(vocab_size=100)
    assert draft(drafter, [1, 2, 3, 4, 1, 2, 99], cached=5, round_index=1).num_tokens == 0
    assert drafter.num_sessions == 1
    drafter.release("s")
    assert drafter.num_sessions == 0


def test_incremental_calls_equal_fresh_ones():
    rng = np.random.default_rng(0)
    drafter, tokens, cached = make_drafter(), rng.integers(0, 4, 3).tolist(), 0
    for index in range(50):
        block = draft(drafter, tokens, cached=cached, round_index=index)
        assert block.token_ids.tolist() == draft(make_drafter(), tokens).token_ids.tolist()
        assert block.cached_len == len(tokens) - 1
        cached = block.cached_len
        tokens = tokens + rng.integers(0, 4, 1 + index % 3).tolist()


def test_the_prefix_protocol_is_kept():
    drafter = make_drafter()
    with pytest.raises(PrefixMismatch):
        draft(drafter, [1, 2, 3], cached=2)
    draft(drafter, [1, 2, 1], round_index=3)
    with pytest.raises(StaleRound):
        draft(drafter, [1, 2, 1], round_index=2)
    with pytest.raises(PrefixMismatch):
        draft(drafter, [1, 9, 1], cached=2, round_index=4)
    with pytest.raises(InvalidRequest):
        draft(drafter, [1, 2], cached=2, round_index=4)


def test_ngram_sizes_are_checked():
    with pytest.raises(InvalidConfig):
        make_drafter(min_ngram=3, max_ngram=2)
    with pytest.raises(InvalidConfig):
        make_drafter(min_ngram=0)


def test_a_round_is_cheap_at_4000_tokens():
    text = np.random.default_rng(0).integers(0, 50_000, 4000).astype(np.int32)
    best = min(_timed(text) for _ in range(20))
    assert best < 2e-4


def _timed(text: np.ndarray) -> float:
    started = time.perf_counter()
    look_up(text, 8)
    return time.perf_counter() - started


def test_load_reads_the_verifiers_limits(tmp_path):
    drafter = load_drafter("prompt-lookup", verifier=str(save_verifier(tmp_path, tiny_llama(), num_words=90)))
    assert drafter.info.vocab_size == 90
    assert drafter.info.max_model_len == 256
    assert drafter.info.is_deterministic
