"""Shards: round trip, order, damage."""

from __future__ import annotations

import numpy as np
import pytest

from specdiff_dist.errors import InvalidConfig
from specdiff_dist.train.answers import TOP, Answer, AnswerStore, is_held_out, shard_path, write_meta, write_shard


def make_answer(seed: int) -> Answer:
    generator = np.random.default_rng(seed)
    prompt, length = int(generator.integers(1, 9)), int(generator.integers(1, 20))
    return Answer(
        generator.integers(0, 1000, prompt + length).astype(np.int32),
        prompt,
        generator.integers(0, 1000, (length, TOP)).astype(np.int32),
        -generator.random((length, TOP)).astype(np.float16),
        seed % 3,
    )


@pytest.fixture
def folder(tmp_path):
    write_meta(tmp_path, {"sources": ["a", "b", "self"]})
    for number in range(3):
        write_shard(tmp_path, number, [make_answer(4 * number + row) for row in range(4)])
    return tmp_path


def test_answers_come_back_in_order(folder):
    store = AnswerStore.open(folder)
    assert (store.num_answers, store.num_shards) == (12, 3)
    for index in (11, 0, 5, 4):
        found, expected = store.answer(index), make_answer(index)
        for name in ("token_ids", "top_ids", "top_log_probs"):
            assert np.array_equal(getattr(found, name), getattr(expected, name))
            assert getattr(found, name).dtype == getattr(expected, name).dtype
        assert (found.prompt_length, found.source) == (expected.prompt_length, expected.source)
        assert np.array_equal(found.answer_ids, expected.token_ids[expected.prompt_length :])
    with pytest.raises(IndexError, match="12 answers"):
        store.answer(12)


def test_only_the_prompts_of_one_source_are_read(folder):
    expected = [make_answer(index) for index in range(12)]
    found = list(AnswerStore.open(folder).prompts(2))
    assert [prompt.tolist() for prompt in found] == [
        answer.token_ids[: answer.prompt_length].tolist() for answer in expected if answer.source == 2
    ]


def test_the_same_answers_are_the_same_bytes(folder, tmp_path):
    before = shard_path(folder, 1).read_bytes()
    write_shard(folder, 1, [make_answer(4 + row) for row in range(4)])
    assert shard_path(folder, 1).read_bytes() == before
    assert not list(folder.glob("*.tmp"))


def test_a_gap_ends_the_store(folder):
    shard_path(folder, 1).unlink()
    assert AnswerStore.open(folder).num_answers == 4


def test_a_shard_may_be_empty(folder):
    write_shard(folder, 1, [])
    store = AnswerStore.open(folder)
    assert store.num_answers == 8
    assert np.array_equal(store.answer(4).token_ids, make_answer(8).token_ids)


def test_damage_is_reported(folder):
    shard_path(folder, 2).write_bytes(shard_path(folder, 2).read_bytes()[:300])
    with pytest.raises(InvalidConfig, match=r"shard-00002\.npz is damaged"):
        AnswerStore.open(folder)
    with pytest.raises(InvalidConfig, match="train-drafter"):
        AnswerStore.open(folder / "none")
    (folder / "meta.json").write_text("{")
    with pytest.raises(InvalidConfig, match="cannot read"):
        AnswerStore.open(folder)


def test_every_twentieth_answer_is_held_out():
    assert [index for index in range(60) if is_held_out(index)] == [0, 20, 40]
