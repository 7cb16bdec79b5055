"""Exact means exact: the joint output law of the real loop, enumerated on small vocabularies.

Every configuration the exact tier admits must show the target's law to 1e-12; the constructions that it refuses must
show a bias, or this test could not fail.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from specdiff_dist.config import ConfidenceThreshold, DecodeConfig, Effort, Linear, Lossless, Off, Policy, Static
from specdiff_dist.core.exactness import check_exact, is_exact
from specdiff_dist.core.rows import SparseRows
from specdiff_dist.core.speculation import Knowledge
from specdiff_dist.errors import InexactConfig
from specdiff_dist.types import SamplingParams
from tests.doubles import (
    Logits,
    ScriptedDrafter,
    TableDrafter,
    TableVerifier,
    make_request,
    processed_probs,
    random_table,
)  # fmt: skip
from tests.law.enumeration import Law, chained, chunks, enumerate_paths, total_variation

PROMPT = (1,)
SAMPLED = SamplingParams(1.0)
ORDERS = ("left_to_right", "max_prob", "token_prob", "entropy")


def target_law(table: Logits, length: int, sampling: SamplingParams, prompt: tuple[int, ...] = PROMPT) -> Law:
    """The verifier alone."""
    law: Law = {(): 1.0}
    for _ in range(length):
        longer: Law = {}
        for done, weight in law.items():
            row = processed_probs(table(prompt + done), sampling).astype(np.float64)
            for token in np.flatnonzero(row):
                longer[(*done, int(token))] = weight * float(row[token] / row.sum())
        law = longer
    return law


def output_law(
    monkeypatch: pytest.MonkeyPatch,
    config: DecodeConfig,
    drafter: TableDrafter | ScriptedDrafter,
    table: Logits,
    vocab: int,
    length: int,
    sampling: SamplingParams = SAMPLED,
    block: int = 4,
    knowledge: Knowledge | None = None,
) -> Law:
    """The system's law of its first `length` tokens, round by round with full blocks."""
    verifier = TableVerifier(table, vocab)

    def one_round(prefix: tuple[int, ...]) -> Law:
        request = make_request(
            prefix, max_tokens=block + 1, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
        )
        return enumerate_paths(
            monkeypatch,
            lambda: chunks(request, config, drafter, verifier, first=True, knowledge=knowledge)[0].token_ids,
        )

    return chained(one_round, PROMPT, length)


POLICIES: tuple[Policy, ...] = (Static(2), ConfidenceThreshold(0.55, 2), ConfidenceThreshold(0.55, 2, "token_prob"))
EFFORTS = [
    Effort(steps, order, early)
    for steps in (1, 2)
    for order in ORDERS
    for early in ("proposal", "one_hot")
    if steps > 1 or (order, early) == ("left_to_right", "proposal")
]
ADMITTED = [
    config
    for effort, policy, draft_temperature in itertools.product(EFFORTS, POLICIES, (None, 0.0, 0.6))
    if is_exact(config := DecodeConfig(Lossless(), effort, policy, draft_temperature), TableDrafter(3).info)
]


@pytest.mark.parametrize("config", ADMITTED, ids=lambda c: f"{c.effort}-{c.policy}-{c.draft_temperature}")
def test_every_admitted_configuration_has_the_targets_law(
    monkeypatch: pytest.MonkeyPatch, config: DecodeConfig
) -> None:
    table = random_table(3, 5)
    got = output_law(monkeypatch, config, TableDrafter(3), table, 3, 3, block=2)
    assert sum(got.values()) == pytest.approx(1.0, abs=1e-12)
    assert total_variation(got, target_law(table, 3, SAMPLED)) < 1e-12


@pytest.mark.parametrize("effort", [Effort(1), Effort(2), Effort(2, "token_prob", "one_hot")], ids=str)
def test_vocabulary_of_four(monkeypatch: pytest.MonkeyPatch, effort: Effort) -> None:
    table = random_table(4, 5)
    got = output_law(monkeypatch, DecodeConfig(effort=effort, policy=Static(2)), TableDrafter(4), table, 4, 2, block=2)
    assert total_variation(got, target_law(table, 2, SAMPLED)) < 1e-12


@pytest.mark.parametrize("effort", [Effort(1), Effort(2), Effort(3), Effort(2, "max_prob", "one_hot")], ids=str)
def test_blocks_of_three(monkeypatch: pytest.MonkeyPatch, effort: Effort) -> None:
    table = random_table(3, 6)
    config = DecodeConfig(effort=effort, policy=Static(3))
    got = output_law(monkeypatch, config, TableDrafter(3), table, 3, 3, block=3)
    assert total_variation(got, target_law(table, 3, SAMPLED)) < 1e-12


@pytest.mark.parametrize(
    "sampling", [SamplingParams(0.7), SamplingParams(1.3, top_k=2), SamplingParams(1.0, top_p=0.7), SamplingParams(0.0)]
)
def test_under_the_requests_sampling_parameters(monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams) -> None:
    """K02 row 13: the law is the *processed* target's; no token outside its nucleus."""
    table = random_table(4, 7)
    for draft_temperature in (None, 1.7):
        config = DecodeConfig(policy=Static(2), draft_temperature=draft_temperature, draft_top_k=3)
        got = output_law(monkeypatch, config, TableDrafter(4), table, 4, 3, sampling, block=2)
        assert total_variation(got, target_law(table, 3, sampling)) < 1e-12


def test_deterministic_drafter_and_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt lookup's kind: one-hot proposals, here also with a policy and an order that a sampling drafter may not use."""
    table = random_table(3, 8)
    drafter = ScriptedDrafter(lambda prefix, n: [(sum(prefix) + i) % 3 for i in range(n)], 3)
    for config in (
        DecodeConfig(policy=Static(2)),
        DecodeConfig(policy=Off()),
        DecodeConfig(effort=Effort(2, "token_prob"), policy=ConfidenceThreshold(0.5, 2, "token_prob")),
    ):
        check_exact(config, drafter.info)
        got = output_law(monkeypatch, config, drafter, table, 3, 3, block=2)
        assert total_variation(got, target_law(table, 3, SAMPLED)) < 1e-12


def test_rounds_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole decodes instead of chained rounds: several rounds share one set of numbers, and none decides twice."""
    table, drafter = random_table(3, 9), TableDrafter(3)
    verifier = TableVerifier(table, 3)
    request = make_request(PROMPT, max_tokens=3, temperature=1.0)
    for config in (DecodeConfig(policy=Static(2)), DecodeConfig(effort=Effort(2), policy=Static(2))):

        def whole(config: DecodeConfig = config) -> tuple[int, ...]:
            got = chunks(request, config, drafter, verifier, first=False)
            return tuple(token for chunk in got for token in chunk.token_ids)

        assert total_variation(enumerate_paths(monkeypatch, whole), target_law(table, 3, SAMPLED)) < 1e-12


# --- the constructions that the exact tier refuses -------------------------------------------------------------------


@pytest.mark.parametrize("order", ["max_prob", "token_prob", "entropy"])
def test_trap_1_is_a_real_bias_and_is_refused(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    config = DecodeConfig(effort=Effort(2, order, "proposal"), policy=Static(2))
    with pytest.raises(InexactConfig, match="trap 1"):
        check_exact(config, TableDrafter(3).info)
    table = random_table(3, 5)
    worst = 0.0
    for seed in (1, 2, 3):  # the bias needs a table in which the right token is revealed first
        got = output_law(monkeypatch, config, TableDrafter(3, seed), table, 3, 2, block=2)
        worst = max(worst, total_variation(got, target_law(table, 2, SAMPLED)))
    assert worst > 1e-3


def test_trap_2_is_a_real_bias_and_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = DecodeConfig(policy=ConfidenceThreshold(0.4, 2, "token_prob"))
    with pytest.raises(InexactConfig, match="trap 2"):
        check_exact(config, TableDrafter(3).info)
    table = random_table(3, 5)
    got = output_law(monkeypatch, config, TableDrafter(3), table, 3, 2, block=2)
    assert total_variation(got, target_law(table, 2, SAMPLED)) > 1e-3
    honest = replace(config, policy=ConfidenceThreshold(0.4, 2, "max_prob"))
    got = output_law(monkeypatch, honest, TableDrafter(3), table, 3, 2, block=2)
    assert total_variation(got, target_law(table, 2, SAMPLED)) < 1e-12


def test_trap_3_is_a_real_bias_and_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = TableDrafter(3, dishonest=True)
    with pytest.raises(InexactConfig, match="trap 3"):
        check_exact(DecodeConfig(), drafter.info)
    table = random_table(3, 5)
    got = output_law(monkeypatch, DecodeConfig(policy=Static(2)), drafter, table, 3, 2, block=2)
    assert total_variation(got, target_law(table, 2, SAMPLED)) > 1e-3


def test_lossy_rule_has_the_law_its_receipt_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear λ, one position: output law (1-λ)p + λq, and the receipt's TV is that law's."""
    table, drafter = random_table(4, 5), TableDrafter(4)
    config = DecodeConfig(rule=Linear(0.4), policy=Static(1))
    request = make_request(PROMPT, max_tokens=2, temperature=1.0)
    reported: set[float] = set()

    def run() -> tuple[int, ...]:
        from specdiff_dist.engine.session import Session  # the receipt of an unfinished session

        seen: list[float] = []
        original = Session.commit

        def commit(self: Session, outcome, num_verified):
            seen.append(float(outcome.tv[0]))
            return original(self, outcome, num_verified)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Session, "commit", commit)
            token_ids = chunks(request, config, drafter, TableVerifier(table, 4), first=True)[0].token_ids
        reported.add(round(seen[0], 9))
        return token_ids[:1]

    got = enumerate_paths(monkeypatch, run)
    distance = total_variation(got, target_law(table, 1, SAMPLED))
    assert distance > 1e-3 and reported == {round(distance, 9)}


def test_the_two_token_counter_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """design: target uniform on pairs, the right token drawn first and copied to the left: 3/8, 1/8, 1/8, 3/8."""
    from specdiff_dist.drafters import denoise as module

    def predict(block: np.ndarray, positions: np.ndarray) -> module.Prediction:
        rows = []
        for position in positions.tolist():
            right = int(block[1])
            row = np.eye(2)[right] if position == 0 and right >= 0 else np.full(2, 0.5)
            rows.append((np.arange(2), row))
        certain = np.array([0.0 if position == 0 else 1.0 for position in positions], np.float32)
        return module.Prediction(SparseRows.from_rows(rows), certain, -certain)

    class Copying(TableDrafter):
        def _predict(self, prefix, sampling, call):
            return predict

    uniform: Logits = lambda prefix: np.zeros(2, np.float32)  # noqa: E731
    config = DecodeConfig(effort=Effort(2, "max_prob", "proposal"), policy=Static(2))
    got = output_law(monkeypatch, config, Copying(2), uniform, 2, 2, block=2)
    assert [got[key] for key in ((0, 0), (0, 1), (1, 0), (1, 1))] == pytest.approx([3 / 8, 1 / 8, 1 / 8, 3 / 8])
    for mended in (replace(config, effort=Effort(2)), replace(config, effort=Effort(2, "max_prob", "one_hot"))):
        got = output_law(monkeypatch, mended, Copying(2), uniform, 2, 2, block=2)
        assert total_variation(got, target_law(uniform, 2, SAMPLED)) < 1e-12
