"""Lossy rules and budgets: the receipt is the enumerated law, for every rule × reveal order × policy."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from specdiff_dist.config import DecodeConfig, Effort
from specdiff_dist.core.acceptance import Acceptance, accept
from specdiff_dist.core.exactness import check_exact
from specdiff_dist.core.rows import SparseRows
from specdiff_dist.core.rules import Cactus, Lenience, Linear, Lossless, Rule, TVBudget, Typical
from specdiff_dist.core.speculation import (
    Additive,
    ConfidenceThreshold,
    FailFast,
    Knowledge,
    LibraSpec,
    MeasuredLibraSpec,
    Policy,
    Static,
)  # fmt: skip
from specdiff_dist.engine import judging
from specdiff_dist.errors import InexactConfig
from specdiff_dist.types import SamplingParams
from tests.doubles import TableDrafter, TableVerifier, make_request, processed_probs, random_table
from tests.law.enumeration import chunks, enumerate_paths, total_variation
from tests.law.test_exact_law import PROMPT, SAMPLED, output_law, target_law

RULES: list[Rule] = [
    Linear(0.4), Linear(1.0), TVBudget(0.1), Cactus(0.05), Cactus(0.6), Cactus(0.6, "taylor"), Lenience(0.4),
    Typical(0.5), Typical(1.0),
]  # fmt: skip
EFFORTS = [Effort(1), Effort(2), Effort(2, "max_prob", "one_hot"), Effort(2, "token_prob", "one_hot")]
POLICIES: list[Policy] = [Static(2), ConfidenceThreshold(0.55, 2), MeasuredLibraSpec(2, 2)]
VOCAB = 3


Place = tuple[tuple[int, ...], bytes]  # tokens accepted before the position, and its proposal row


def laws_and_receipts(
    monkeypatch: pytest.MonkeyPatch, config: DecodeConfig, sampling: SamplingParams = SAMPLED
) -> dict[Place, tuple[dict[int, float], set[tuple[float, float]]]]:
    """Per position of a first round: the law of its token, given that it is reached with this proposal, and all
    (TV, KL) that receipts reported for it."""
    table, drafter = random_table(VOCAB, 5), TableDrafter(VOCAB)
    request = make_request(
        PROMPT, max_tokens=3, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
    )
    seen: list[tuple[SparseRows, Acceptance]] = []
    reported: dict[Place, set[tuple[float, float]]] = defaultdict(set)
    reached: dict[Place, dict[int, float]] = defaultdict(lambda: defaultdict(float))

    def watched(rule: Rule, token_ids: np.ndarray, proposals: SparseRows, *rest: Any) -> Acceptance:
        outcome = accept(rule, token_ids, proposals, *rest)
        seen.append((proposals, outcome))
        return outcome

    monkeypatch.setattr(judging, "accept", watched)

    def run() -> tuple[Any, ...]:
        chunks(request, config, drafter, TableVerifier(table, VOCAB), first=True)
        proposals, outcome = seen.pop()
        tokens = tuple(outcome.token_ids.tolist())
        places = []
        for position in range(min(outcome.num_accepted + 1, proposals.num_rows)):
            ids, probs = proposals.row(position)
            place = (tokens[:position], ids.tobytes() + probs.tobytes())
            reported[place].add((float(outcome.tv[position]), float(outcome.kl[position])))
            places.append((place, tokens[position]))
        return tuple(places)

    paths: dict[Any, float] = dict(enumerate_paths(monkeypatch, run))
    for places, weight in paths.items():
        for place, token in places:
            reached[place][token] += weight
    return {
        place: ({token: weight / sum(law.values()) for token, weight in law.items()}, reported[place])
        for place, law in reached.items()
    }


def divergence(law: dict[int, float], prefix: tuple[int, ...], sampling: SamplingParams) -> tuple[float, float]:
    row = processed_probs(random_table(VOCAB, 5)(PROMPT + prefix), sampling).astype(np.float64)
    row /= row.sum()
    tv = 0.5 * sum(abs(law.get(token, 0.0) - row[token]) for token in range(VOCAB))
    kl = sum(w * (math.log(w / row[t]) if row[t] > 0 else math.inf) for t, w in law.items() if w > 1e-15)
    return tv, kl


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_receipts_are_the_law(monkeypatch: pytest.MonkeyPatch, rule: Rule, policy: Policy) -> None:
    for effort in EFFORTS:
        if isinstance(policy, MeasuredLibraSpec) and effort == Effort(2):
            continue  # looks at later rows that depend on earlier tokens (trap 2)
        positions = laws_and_receipts(monkeypatch, DecodeConfig(rule, effort, policy))
        assert len(positions) > 1
        for (before, _), (law, reported) in positions.items():
            tv, kl = divergence(law, before, SAMPLED)
            assert len({(round(a, 12), round(b, 12)) for a, b in reported}) == 1
            ((got_tv, got_kl), *_) = reported
            assert got_tv == pytest.approx(tv, abs=1e-9) and got_kl == pytest.approx(kl, abs=1e-9)


def test_truncated_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft outside the nucleus: KL infinite, TV exact."""
    sampling = SamplingParams(1.0, top_k=2)
    config = DecodeConfig(Linear(0.4), policy=Static(1), draft_temperature=3.0)
    for (before, _), (law, reported) in laws_and_receipts(monkeypatch, config, sampling).items():
        tv, kl = divergence(law, before, sampling)
        ((got_tv, got_kl), *_) = reported
        assert got_tv == pytest.approx(tv, abs=1e-9)
        assert got_kl == kl == math.inf or got_kl == pytest.approx(kl, abs=1e-9)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_leniency_that_is_budgeted_away_is_exact(monkeypatch: pytest.MonkeyPatch, rule: Rule) -> None:
    """Once the budget is spent the law is the target's."""
    table = random_table(3, 5)
    config = DecodeConfig(rule, policy=Static(2), tv_budget=0.0)
    got = output_law(monkeypatch, config, TableDrafter(3), table, 3, 2, block=2)
    assert total_variation(got, target_law(table, 2, SAMPLED)) < 1e-12


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rule", [*RULES[:-2], Lossless()], ids=str)
def test_wide_rows_decide_alike(rule: Rule, wide: bool) -> None:
    """Every rule from the target on the proposals' support (Cactus by resolving one row) as from whole rows."""
    table, drafter = random_table(20, 3), TableDrafter(20)

    def run(wide: bool) -> list[tuple[int, ...]]:
        verifier = TableVerifier(table, 20, wide=wide)
        request = make_request(PROMPT, max_tokens=40, temperature=1.0, seed=5)
        config = DecodeConfig(rule, policy=Static(4), draft_top_k=6)
        return [chunk.token_ids for chunk in chunks(request, config, drafter, verifier, first=False)]

    assert run(wide) == run(False)


@pytest.mark.parametrize(
    "policy",
    [
        Static(3), ConfidenceThreshold(0.5, 3), ConfidenceThreshold(0.5, 3, "sum_squares"), Additive(2, 4),
        FailFast(0.5, 1, 3, "max_prob"), FailFast(0.4, 2, 4, "sum_squares"), FailFast(0.5, 1, 3, "token_prob"),
        FailFast(0.4, 2, 4, "token_prob"), LibraSpec(2.0, 2, 2, "max_prob"),
        MeasuredLibraSpec(1, 3), MeasuredLibraSpec(2, 4, "sum_squares"),
    ],
    ids=str,
)  # fmt: skip
def test_admitted_policies_are_exact(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    """Several blocks included: a later block is drafted given the earlier ones. FailFast may look at sampled tokens: what
    it has looked at is always submitted, so it only decides about tokens to the right."""
    table = random_table(3, 5)
    knowledge = Knowledge()
    for length in (0, 1, 2, 3, 4) * 20:
        knowledge.costs.observe(2, 1e-3, length, 1e-2 + 2e-3 * length)
    for effort in (Effort(1), Effort(2, "max_prob", "one_hot")):
        config = DecodeConfig(effort=effort, policy=policy)
        check_exact(config, drafter=TableDrafter(3).info)
        got = output_law(monkeypatch, config, TableDrafter(3), table, 3, 2, block=4, knowledge=knowledge)
        assert total_variation(got, target_law(table, 2, SAMPLED)) < 1e-12


@pytest.mark.parametrize(
    ("effort", "policy", "seed"),
    [(Effort(1), LibraSpec(1.1, 2, 3, "token_prob"), 2), (Effort(3), LibraSpec(1.2, 3, 4, "max_prob"), 1)],
    ids=str,
)
def test_refused_roll_backs_are_biased(
    monkeypatch: pytest.MonkeyPatch, effort: Effort, policy: LibraSpec, seed: int
) -> None:
    """Two faces of trap 2: cutting by the sampled token itself; cutting a token because of what was drafted given it."""
    config = DecodeConfig(effort=effort, policy=policy)
    with pytest.raises(InexactConfig, match="trap 2"):
        check_exact(config, TableDrafter(3).info)
    table = random_table(3, 5 + seed)
    got = output_law(monkeypatch, config, TableDrafter(3, seed, sharpness=1.0), table, 3, 2, block=4)
    assert total_variation(got, target_law(table, 2, SAMPLED)) > 1e-3
