"""The linear rule against transformers' `assistant_ensemble_weight` w = 1 - λ, on two tiny random models."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import utils as generation

from specdiff_dist.core.acceptance import accept
from specdiff_dist.core.rows import SparseRows
from specdiff_dist.core.rules import Linear
from specdiff_dist.types import TargetRows
from tests.law.enumeration import enumerate_paths

VOCAB = 4
LENGTH = 2
PROMPT = [1, 3, 2]
NUM_RUNS = 5_000


def tiny_model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        initializer_range=0.5, eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def logits() -> dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]]:
    """Drafted tokens -> logits of the target at LENGTH + 1 positions and of the assistant at LENGTH."""
    target, assistant = tiny_model(1), tiny_model(2)
    rows = {}
    with torch.inference_mode():
        for drafted in itertools.product(range(VOCAB), repeat=LENGTH):
            ids: Any = torch.tensor([PROMPT + list(drafted)])
            rows[drafted] = (
                target(ids).logits[:, len(PROMPT) - 1 :].clone(),
                assistant(ids).logits[:, len(PROMPT) - 1 : -1].clone(),
            )
    return rows


def softmax(logits: torch.Tensor) -> np.ndarray:
    return torch.softmax(logits[0], -1).numpy()


def sparse(rows: np.ndarray) -> SparseRows:
    return SparseRows.from_rows([(np.arange(VOCAB), row) for row in rows])


def draft_probability(drafted: tuple[int, ...], rows: tuple[torch.Tensor, torch.Tensor]) -> float:
    q = softmax(rows[1]).astype(np.float64)
    return float(np.prod([q[i, token] / q[i].sum() for i, token in enumerate(drafted)]))


def our_law(monkeypatch: pytest.MonkeyPatch, logits: dict, leniency: float) -> dict[tuple[int, ...], float]:
    """Law of the tokens one round commits, over all drafts and all outcomes of ours."""
    law: dict[tuple[int, ...], float] = {}
    accept_uniforms, target_uniforms = np.linspace(0.1, 0.2, LENGTH), np.linspace(0.3, 0.4, LENGTH + 1)
    for drafted, rows in logits.items():
        p = sparse(softmax(rows[0]))
        target = TargetRows(p, p.row_sums(), None, None, 0)
        proposals, tokens = sparse(softmax(rows[1])), np.array(drafted, np.int32)

        def run() -> tuple[int, ...]:
            rule = Linear(leniency)
            outcome = accept(rule, tokens, proposals, target, accept_uniforms, target_uniforms)  # noqa: B023
            return tuple(outcome.token_ids.tolist())

        for committed, weight in enumerate_paths(monkeypatch, run).items():
            law[committed] = law.get(committed, 0.0) + weight * draft_probability(drafted, rows)
    return law


def their_rounds(logits: dict, leniency: float) -> Counter[tuple[int, ...]]:
    """What transformers commits in NUM_RUNS rounds over drafts from the assistant."""
    drafts = list(logits)
    weights = np.array([draft_probability(drafted, logits[drafted]) for drafted in drafts])
    numbers = np.random.default_rng(0).choice(len(drafts), NUM_RUNS, p=weights / weights.sum())
    torch.manual_seed(0)
    seen: Counter[tuple[int, ...]] = Counter()
    for number in numbers.tolist():
        drafted = drafts[number]
        target, assistant = logits[drafted]
        tokens, _ = generation._speculative_sampling(
            torch.tensor([PROMPT + list(drafted)]), assistant, LENGTH, target,
            assistant_ensemble_weight=1.0 - leniency if leniency else None,
        )  # fmt: skip
        seen[tuple(tokens[0].tolist())] += 1
    return seen


def p_value(law: dict[tuple[int, ...], float], seen: Counter[tuple[int, ...]]) -> float:
    expected = np.array(list(law.values())) * NUM_RUNS
    observed = np.array([seen[key] for key in law], float)
    rare = expected < 5.0
    expected, observed = (np.append(counts[~rare], counts[rare].sum()) for counts in (expected, observed))
    return float(stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue)


@pytest.mark.parametrize("leniency", [0.0, 0.3, 0.8])
def test_rounds_have_one_law(monkeypatch: pytest.MonkeyPatch, logits: dict, leniency: float) -> None:
    seen = their_rounds(logits, leniency)
    law = our_law(monkeypatch, logits, leniency)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-9)
    assert not set(seen) - set(law)
    value = p_value(law, seen)
    print(f"\nλ = {leniency}: p = {value:.4g}, {len(law)} outcomes")
    assert value > 0.001
    assert p_value(our_law(monkeypatch, logits, leniency + 0.15), seen) < 1e-6  # the test can tell


@pytest.mark.parametrize("leniency", [0.1, 0.5, 0.9])
def test_the_same_numbers_decide_alike(monkeypatch: pytest.MonkeyPatch, leniency: float) -> None:
    """Given its uniforms, transformers keeps as many tokens as we do and draws the next from the same weights."""
    rng = np.random.default_rng(5)
    vocab, length = 12, 4
    drawn_from: list[np.ndarray] = []

    def multinomial(weights: torch.Tensor, num_samples: int) -> torch.Tensor:
        drawn_from.append(weights.numpy().ravel().astype(np.float64))
        return torch.zeros((1, 1), dtype=torch.long)

    def draw_index(weights: np.ndarray, uniform: float) -> int:
        drawn_from.append(weights / weights.sum())
        return 0

    monkeypatch.setattr(torch, "multinomial", multinomial)
    monkeypatch.setattr("specdiff_dist.core.sampling.draw_index", draw_index)
    kept = set()
    for _ in range(100):
        target = torch.from_numpy(2.0 * rng.standard_normal((1, length + 1, vocab)))
        assistant = target[:, :-1] + torch.from_numpy(rng.standard_normal((1, length, vocab)))
        p, q = softmax(target), softmax(assistant)
        drafted = np.array([rng.choice(vocab, p=row) for row in q], np.int32)
        uniforms = rng.random(length)
        monkeypatch.setattr(torch, "rand_like", lambda ratio, u=uniforms: torch.from_numpy(u).view_as(ratio))
        _, num_matches = generation._speculative_sampling(
            torch.from_numpy(drafted.astype(np.int64))[None], assistant, length, target, 1.0 - leniency
        )
        rows = [SparseRows.from_rows([(np.arange(vocab), row) for row in side]) for side in (p, q)]
        narrow = TargetRows(rows[0], rows[0].row_sums(), None, None, 0)
        outcome = accept(Linear(leniency), drafted, rows[1], narrow, uniforms, np.zeros(length + 1))
        assert outcome.num_accepted == int(num_matches)
        theirs, ours = drawn_from
        np.testing.assert_allclose(ours, theirs / theirs.sum(), atol=1e-6)
        drawn_from.clear()
        kept.add(outcome.num_accepted)
    assert len(kept) > 2
