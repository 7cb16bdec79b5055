from __future__ import annotations

import numpy as np
import pytest
import torch

from specdiff_dist.drafters.block_model import MASK_ID
from specdiff_dist.errors import InvalidConfig
from specdiff_dist.train.batches import Batches, BatchOptions, choose_draft_vocab, count_tokens
from tests.tiny_models import VOCAB_SIZE, tiny_llama
from tests.train.toy_answers import ToyAnswers, answers_of

ANSWERS = answers_of(tiny_llama(), count=45)


def batches_of(*, draft_vocab: np.ndarray | None = None, answers: ToyAnswers = ANSWERS, **options) -> Batches:
    chosen = BatchOptions(**{"answers_per_batch": 3, "blocks_per_answer": 4, "block_size": 5, **options})
    return Batches(answers, chosen, vocab_size=VOCAB_SIZE, draft_vocab=draft_vocab)


def rows_of(batch, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(prefix, anchors, blocks) of the batch's answer `number`."""
    blocks = slice(*batch.block_splits[number : number + 2])
    prefix = batch.prefix_ids[slice(*batch.prefix_splits[number : number + 2])]
    return prefix.numpy(), batch.anchors[blocks].numpy(), batch.block_ids[blocks].numpy()


def owner_of(prefix: np.ndarray) -> int:
    found = [
        i for i in range(ANSWERS.num_answers)
        if np.array_equal(ANSWERS.answer(i).token_ids[: len(prefix)], prefix)
    ]  # fmt: skip
    assert len(found) == 1
    return found[0]


def test_a_batch_is_a_function_of_seed_and_index():
    first, again, other = batches_of(), batches_of(), batches_of(seed=1)
    again.training_batch(7)  # whatever was asked for before
    for index in (0, 30, 3):
        for name in ("prefix_ids", "block_ids", "anchors", "wanted"):
            assert torch.equal(getattr(first.training_batch(index), name), getattr(again.training_batch(index), name))
    assert not torch.equal(first.training_batch(0).prefix_ids, other.training_batch(0).prefix_ids)


def test_an_epoch_visits_every_training_answer_once_and_no_held_out_one():
    batches = batches_of(answers_per_batch=6)
    seen = [owner_of(rows_of(batches.training_batch(index), n)[0]) for index in range(7) for n in range(6)]
    assert sorted(seen) == [i for i in range(45) if i % 20]
    held_out = list(batches.held_out_batches(max_answers=10, blocks_per_answer=3))
    assert [owner_of(rows_of(batch, n)[0]) for batch in held_out for n in range(3)] == [0, 20, 40]


def test_blocks_hold_the_answers_tokens_or_masks_and_targets_are_of_the_next_token():
    batches = batches_of()
    for index in range(20):
        batch = batches.training_batch(index)
        wanted = np.zeros(batch.block_ids.shape, bool)
        wanted.flat[batch.wanted.numpy()] = True
        row = 0
        for number in range(3):
            prefix, anchors, blocks = rows_of(batch, number)
            answer = ANSWERS.answer(owner_of(prefix))
            assert anchors.min() >= answer.prompt_length - 1 and len(set(anchors)) == len(anchors)
            assert len(prefix) == anchors.max()
            for anchor, block, is_wanted in zip(
                anchors, blocks, wanted[slice(*batch.block_splits[number:][:2])], strict=True
            ):
                assert block[0] == answer.token_ids[anchor]
                for slot in range(5):
                    token = answer.token_ids[anchor + slot] if anchor + slot < len(answer.token_ids) else None
                    assert block[slot] in (MASK_ID, token)
                    has_next = anchor + slot + 1 < len(answer.token_ids)
                    is_hidden = slot == 4 or block[slot + 1] == MASK_ID
                    assert is_wanted[slot] == (has_next and is_hidden)
                    if is_wanted[slot]:
                        at = anchor + slot + 1 - answer.prompt_length
                        targets = batch.targets
                        assert targets.columns[row].tolist() == answer.top_ids[at].tolist()
                        np.testing.assert_allclose(
                            targets.probs[row], np.exp(answer.top_log_probs[at].astype(np.float32)), rtol=1e-6
                        )
                        assert targets.top_column[row] == answer.top_ids[at, 0]
                        assert targets.drawn_column[row] == answer.token_ids[anchor + slot + 1]
                        row += 1
        assert row == len(batch.wanted)


def test_kinds_of_masks():
    def kinds(share: float) -> list[str]:
        found = []
        batches = batches_of(fully_masked=share, answers_per_batch=40, blocks_per_answer=2, block_size=6)
        for index in range(30):
            for block in batches.training_batch(index).block_ids.numpy()[:, 1:] == MASK_ID:
                beginning = np.argmax(block) if block.any() else len(block)
                found.append("full" if block.all() else "beginning" if block[beginning:].all() else "scattered")
        return found

    assert set(kinds(1.0)) == {"full"}
    mixed = kinds(0.5)
    assert 0.5 < mixed.count("full") / len(mixed) < 0.75  # ends of answers and rates near 1 are added
    assert mixed.count("beginning") > 0.1 * len(mixed) and mixed.count("scattered") > 0.05 * len(mixed)


def test_targets_are_columns_of_the_draft_vocab():
    vocab = np.array([3, 10, 11, 40, 70, 71, 72, 90])
    plain, small = batches_of().training_batch(1), batches_of(draft_vocab=vocab).training_batch(1)
    is_in = np.isin(plain.targets.columns, vocab)
    columns, expected = small.targets.columns.numpy(), plain.targets.columns.numpy()
    assert is_in.any() and not is_in.all()
    np.testing.assert_array_equal(vocab[columns[is_in]], expected[is_in])
    np.testing.assert_array_equal(small.targets.probs, plain.targets.probs.numpy() * is_in)
    tops = np.where(small.targets.top_column >= 0, vocab[small.targets.top_column], -1)
    np.testing.assert_array_equal(
        tops, np.where(np.isin(plain.targets.top_column, vocab), plain.targets.top_column, -1)
    )


def test_long_answers_are_cut_and_too_few_refused():
    batch = batches_of(max_length=8).training_batch(0)
    assert batch.anchors.max() < 7 and len(batch.prefix_ids) <= 3 * 7
    with pytest.raises(InvalidConfig, match="too few"):
        batches_of(max_length=1)
    with pytest.raises(InvalidConfig, match="block_size"):
        BatchOptions(block_size=0)


def test_the_draft_vocab_is_the_most_frequent_tokens_of_the_training_answers():
    counts = count_tokens(ANSWERS, VOCAB_SIZE)
    assert counts.sum() == 2 * sum(
        len(ANSWERS.answer(i).token_ids) - ANSWERS.answer(i).prompt_length for i in range(45) if i % 20
    )
    chosen = choose_draft_vocab(counts, 10, vocab_size=VOCAB_SIZE)
    assert chosen is not None and np.all(np.diff(chosen) > 0)
    assert counts[chosen].min() >= np.delete(counts, chosen).max()
    assert choose_draft_vocab(counts, 0, vocab_size=VOCAB_SIZE) is None
    few = choose_draft_vocab(np.array([0, 5, 0, 9, 9]), 3, vocab_size=4)  # 4 is padding; 0 comes before 2
    assert few is not None and few.tolist() == [0, 1, 3]
