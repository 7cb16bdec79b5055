"""Training batches from answers: a pure function of (seed, index), so that a resumed run sees what the first would have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specdiff_dist.drafters.block_model import MASK_ID
from specdiff_dist.errors import InvalidConfig
from specdiff_dist.train.answers import HELD_OUT_EVERY, Answer, AnswerStore, is_held_out
from specdiff_dist.train.blocks import BlockBatch, Targets
from specdiff_dist.train.features import FeatureStore

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How much of which answers a batch holds.

    fully_masked: share of the blocks with everything after the anchor masked; of the others half are masked at a random
        rate and half have a beginning of random length revealed.
    """

    answers_per_batch: int = 4
    blocks_per_answer: int = 32
    block_size: int = 8
    max_length: int = 512  # tokens of an answer, with its prompt, that are looked at
    fully_masked: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("answers_per_batch", "blocks_per_answer", "block_size"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0.0 <= self.fully_masked <= 1.0:
            raise InvalidConfig(f"fully_masked is a share, 0 … 1, not {self.fully_masked}")


class Batches:
    """Batches over the training answers and over the held-out ones."""

    def __init__(
        self,
        answers: AnswerStore,
        options: BatchOptions,
        *,
        vocab_size: int,
        draft_vocab: Ints | None = None,
        features: FeatureStore | None = None,
    ) -> None:
        """draft_vocab: [Vd], the token ids of the drafter's output columns. features: for networks that need them.
        Raises InvalidConfig without usable answers."""
        self.options = options
        self._features = features
        self._answers = answers
        self._column_of = np.arange(vocab_size)
        if draft_vocab is not None:
            self._column_of = np.full(vocab_size, -1)
            self._column_of[draft_vocab] = np.arange(len(draft_vocab))
        usable = [i for i in range(answers.num_answers) if self._num_anchors(answers.answer(i)) > 0]
        self.training = np.array([i for i in usable if not is_held_out(i)], np.int64)
        self.held_out = np.array([i for i in usable if is_held_out(i)], np.int64)
        if not len(self.training) or not len(self.held_out):
            raise InvalidConfig(
                f"{len(usable)} answers are too few to train on and hold out every {HELD_OUT_EVERY}th: make more"
            )
        self._epoch, self._order = -1, self.training

    def training_batch(self, index: int) -> BlockBatch:
        """Batch `index`: the next answers of an endless walk that visits every answer once per epoch."""
        options = self.options
        rng = np.random.default_rng([options.seed, 1, index])
        first = index * options.answers_per_batch
        chosen = [self._training_index(first + i) for i in range(options.answers_per_batch)]
        parts = []
        for at in chosen:
            answer = self._answers.answer(at)
            num_anchors = self._num_anchors(answer)
            count = min(options.blocks_per_answer, num_anchors)
            anchors = answer.prompt_length - 1 + np.sort(rng.choice(num_anchors, count, replace=False))
            parts.append((at, anchors, self._masked(rng, count)))
        return self._pack(parts)

    def held_out_batches(self, *, max_answers: int, blocks_per_answer: int) -> Iterator[BlockBatch]:
        """Fully masked blocks at evenly spaced anchors of evenly spaced held-out answers."""
        chosen = _evenly(self.held_out, max_answers)
        for start in range(0, len(chosen), self.options.answers_per_batch):
            parts = []
            for at in chosen[start : start + self.options.answers_per_batch]:
                answer = self._answers.answer(int(at))
                anchors = answer.prompt_length - 1 + _evenly(np.arange(self._num_anchors(answer)), blocks_per_answer)
                parts.append((int(at), anchors, np.ones((len(anchors), self.options.block_size), bool)))
            yield self._pack(parts)

    def _num_anchors(self, answer: Answer) -> int:
        """An anchor is any token from the prompt's last on that another one follows."""
        return min(len(answer.token_ids), self.options.max_length) - answer.prompt_length

    def _training_index(self, position: int) -> int:
        epoch, at = divmod(position, len(self.training))
        if epoch != self._epoch:
            rng = np.random.default_rng([self.options.seed, 2, epoch])
            self._epoch, self._order = epoch, rng.permutation(self.training)
        return int(self._order[at])

    def _masked(self, rng: np.random.Generator, count: int) -> NDArray[np.bool_]:
        """bool [count, B]; the anchor's column is never looked at."""
        size, kinds = self.options.block_size, rng.random(count)
        at_a_rate = rng.random((count, size)) < rng.random(count)[:, None]
        after_a_beginning = np.arange(size) > rng.integers(1, max(size, 2), count)[:, None]
        half = (1.0 + self.options.fully_masked) / 2
        masked = np.where((kinds < half)[:, None], at_a_rate, after_a_beginning)
        masked[kinds < self.options.fully_masked] = True
        return masked

    def _pack(self, parts: Sequence[tuple[int, Ints, NDArray[np.bool_]]]) -> BlockBatch:
        """parts: index of an answer, its anchors, what is masked after each."""
        size = self.options.block_size
        prefixes, blocks, wanted, top_ids, top_log_probs, drawn, features = [], [], [], [], [], [], []
        for at, anchors, masked in parts:
            answer = self._answers.answer(at)
            end = min(len(answer.token_ids), self.options.max_length)
            positions = anchors[:, None] + np.arange(size + 1)  # of the block's tokens and the one after it
            tokens = answer.token_ids[np.minimum(positions, end - 1)].astype(np.int64)
            hidden = masked | (positions[:, :size] >= end)
            hidden[:, 0] = False
            blocks.append(np.where(hidden, MASK_ID, tokens[:, :size]))
            is_wanted = np.ones((len(anchors), size), bool)
            is_wanted[:, :-1] = hidden[:, 1:]
            is_wanted &= positions[:, 1:] < end
            wanted.append(is_wanted)
            rows = (positions[:, 1:] - answer.prompt_length)[is_wanted]
            top_ids.append(answer.top_ids[rows])
            top_log_probs.append(answer.top_log_probs[rows])
            drawn.append(tokens[:, 1:][is_wanted])
            prefixes.append(answer.token_ids[: int(anchors[-1])].astype(np.int64))
            if self._features is not None:
                features.append(self._features.of(at)[: int(anchors[-1])])
        columns = self._column_of[np.concatenate(top_ids)]
        probs = np.exp(np.concatenate(top_log_probs).astype(np.float32)) * (columns >= 0)
        return BlockBatch(
            prefix_ids=torch.from_numpy(np.concatenate(prefixes)),
            prefix_splits=_splits(prefixes),
            block_ids=torch.from_numpy(np.concatenate(blocks)),
            anchors=torch.from_numpy(np.concatenate([anchors for _, anchors, _ in parts])),
            block_splits=_splits(blocks),
            wanted=torch.from_numpy(np.flatnonzero(np.concatenate(wanted))),
            targets=Targets(
                columns=torch.from_numpy(np.maximum(columns, 0)),
                probs=torch.from_numpy(probs),
                top_column=torch.from_numpy(columns[:, 0].copy()),
                drawn_column=torch.from_numpy(self._column_of[np.concatenate(drawn)]),
            ),
            prefix_features=torch.from_numpy(np.concatenate(features)) if features else None,
        )


def count_tokens(answers: AnswerStore, vocab_size: int) -> Ints:
    """How often each token id occurs in the training answers, as a token and as the verifier's most probable one. [V]."""
    counts = np.zeros(vocab_size, np.int64)
    for index in range(answers.num_answers):
        if not is_held_out(index):
            answer = answers.answer(index)
            counts += np.bincount(answer.token_ids[answer.prompt_length :], minlength=vocab_size)
            counts += np.bincount(answer.top_ids[:, 0], minlength=vocab_size)
    return counts


def choose_draft_vocab(counts: Ints, size: int, *, vocab_size: int) -> Ints | None:
    """The `size` most frequent of the token ids < vocab_size, ascending; None (all of them) for 0 or the whole matrix.

    Ids that do not occur at all come last, the smaller ones first: in a byte-pair vocabulary they are the more frequent.
    """
    if size <= 0 or size >= len(counts):
        return None
    order = np.argsort(-counts[:vocab_size], kind="stable")
    return np.sort(order[:size])


def _splits(parts: Sequence[np.ndarray]) -> tuple[int, ...]:
    return (0, *np.cumsum([len(part) for part in parts]).tolist())


def _evenly(items: Ints, count: int) -> Ints:
    if len(items) <= count:
        return items
    return items[np.round(np.linspace(0, len(items) - 1, count)).astype(np.int64)]
