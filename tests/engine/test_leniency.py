"""Lossy rules in the real loop: gating by tier, and what the leniency knob does (K32)."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from specdiff_dist.config import TIERS, DecodeConfig, Static
from specdiff_dist.core.rules import Cactus, Lenience, Linear, Lossless, Rule, TVBudget, Typical
from specdiff_dist.errors import InexactConfig
from specdiff_dist.quality import apply_overrides, resolve_quality
from specdiff_dist.types import Receipt
from tests.doubles import TableDrafter, TableVerifier, make_request, random_table
from tests.law.enumeration import chunks

VOCAB = 12
TABLE = random_table(VOCAB, 2)
LADDERS: dict[str, list[Rule]] = {
    "linear": [Linear(x / 4) for x in range(5)],
    "tv_budget": [TVBudget(x / 4) for x in range(5)],
    "cactus": [Cactus(x) for x in (0.0, 0.05, 0.3, 1.0, 5.0)],
    "cactus_taylor": [Cactus(x, "taylor") for x in (0.0, 0.05, 0.3, 1.0, 5.0)],
    "lenience": [Lenience(x) for x in (0.0, 0.25, 0.5, 0.75, 0.99)],
    "typical": [Typical(x) for x in (0.0, 0.25, 0.5, 0.75, 1.0)],
}


def answer(config: DecodeConfig, temperature: float, seed: int) -> tuple[list[tuple[int, ...]], Receipt]:
    """Tokens round by round, and the receipt."""
    request = make_request((1, 2), max_tokens=32, temperature=temperature, seed=seed)
    got = chunks(request, config, TableDrafter(VOCAB), TableVerifier(TABLE, VOCAB), first=False)
    receipt = got[-1].receipt
    assert receipt is not None
    return [chunk.token_ids for chunk in got], receipt


def test_the_exact_tier_is_exact_whatever_the_server_is_set_to() -> None:
    """Row 178: lossy tiers, a lossy default tier: a request for the exact tier gets the lossless rule, and is told."""
    tiers = {
        name: config if name == "exact" else apply_overrides(config, {"rule": "linear", "leniency": 0.9})
        for name, config in TIERS.items()
    }
    name, config = resolve_quality("exact", default_tier="turbo", tiers=tiers, drafter=TableDrafter(VOCAB).info)
    assert (name, config) == ("exact", TIERS["exact"])
    tokens, receipt = answer(config, 1.0, 0)
    assert tokens == answer(TIERS["exact"], 1.0, 0)[0]
    assert receipt.config.rule == Lossless() and receipt.exact and receipt.total_tv == 0.0

    _, lossy = resolve_quality(None, default_tier="turbo", tiers=tiers, drafter=TableDrafter(VOCAB).info)
    _, told = answer(lossy, 1.0, 0)
    assert told.config.rule == Linear(0.9) and not told.exact and told.total_tv > 0.0
    for setting in ({"leniency": 0.1}, {"rule": "cactus", "leniency": 0.1}):
        overridden = {**tiers, "exact": apply_overrides(TIERS["exact"], setting)}
        with pytest.raises(InexactConfig):
            resolve_quality("exact", default_tier="exact", tiers=overridden, drafter=None)


@pytest.mark.parametrize("ladder", LADDERS.values(), ids=LADDERS)
def test_looser_accepts_more(ladder: list[Rule]) -> None:
    """Row 180: in a first round, where the random numbers are the same, never less; over whole answers, clearly more."""
    rates = []
    first_rounds: list[list[int]] = []
    for rule in ladder:
        answers = [answer(DecodeConfig(rule, policy=Static(4)), 1.0, seed) for seed in range(12)]
        first_rounds.append([len(tokens[0]) - 1 for tokens, _ in answers])
        drafted = sum(receipt.num_draft_tokens for _, receipt in answers)
        rates.append(sum(receipt.num_accepted_tokens for _, receipt in answers) / drafted)
    for tight, loose in itertools.pairwise(first_rounds):
        assert all(a <= b for a, b in zip(tight, loose, strict=True))
    assert rates == sorted(rates) and rates[-1] > rates[0] + 0.05


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("ladder", LADDERS.values(), ids=LADDERS)
def test_the_strict_end_is_lossless(ladder: list[Rule], temperature: float) -> None:
    """Row 180, at temperature 0 and above: the same tokens in the same rounds, and a receipt that says exact."""
    for seed in range(3):
        lossless = answer(DecodeConfig(policy=Static(4)), temperature, seed)
        strict = answer(DecodeConfig(ladder[0], policy=Static(4)), temperature, seed)
        assert strict[0] == lossless[0]
        assert dataclasses.replace(strict[1], config=lossless[1].config) == lossless[1] and strict[1].exact
