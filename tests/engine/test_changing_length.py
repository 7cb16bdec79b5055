"""Draft lengths that change from round to round (K31)."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import pytest

from specdiff_dist.config import DecodeConfig, Static
from specdiff_dist.core.speculation import Additive, Knowledge, MeasuredLibraSpec, Policy
from specdiff_dist.engine import drafting
from tests.doubles import ScriptedDrafter, TableVerifier, greedy_script, make_request, plain_greedy, random_table
from tests.law.enumeration import chunks

VOCAB = 12
TABLE = random_table(VOCAB, 2)
LENGTHS = [4] * 5 + [0] * 10 + [4] * 5


def test_no_state_goes_stale_while_nothing_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 172: 4 → 0 for ten rounds → 4: a drafter that is the target has everything accepted again at once."""
    lengths = iter(LENGTHS)

    def plan(policy: Policy, knowledge: Knowledge) -> Generator[int, object, int]:
        length = next(lengths)
        yield length
        return length

    monkeypatch.setattr(drafting, "plan", plan)
    drafter = ScriptedDrafter(greedy_script(TABLE), VOCAB)
    request = make_request((1,), max_tokens=60, ignore_eos=True)
    got = chunks(request, DecodeConfig(policy=Static(4)), drafter, TableVerifier(TABLE, VOCAB), first=False)
    rounds = [record for chunk in got for record in chunk.rounds]
    assert [record.num_verified for record in rounds] == LENGTHS
    assert all(record.num_accepted == record.num_verified for record in rounds)
    assert [token for chunk in got for token in chunk.token_ids] == plain_greedy(TABLE, (1,), 60)
    assert [call.prefix.num_committed for call in drafter.calls][5] == 1 + 5 * 5 + 10  # caught up in one call


@pytest.mark.parametrize("policy", [Additive(8, 8), MeasuredLibraSpec(8, 8)], ids=str)
def test_a_useless_drafter_is_asked_for_less(policy: Policy) -> None:
    """Row 176: always wrong, at a cost per token: the length falls to the lower end and stays within bounds."""
    wrong = ScriptedDrafter(lambda prefix, n: [(plain_greedy(TABLE, prefix, 1)[0] + 1) % VOCAB] * n, VOCAB)
    knowledge = Knowledge()
    for length in (0, 2, 4, 8) * 10:
        knowledge.costs.observe(length, 2e-4 * length, length, 1e-2 + 2e-4 * length)
    request = make_request((1,), max_tokens=80, ignore_eos=True)
    got = chunks(
        request, DecodeConfig(policy=policy), wrong, TableVerifier(TABLE, VOCAB), first=False, knowledge=knowledge
    )
    lengths = np.array([record.num_verified for chunk in got for record in chunk.rounds])
    assert lengths.min() >= 0 and lengths.max() <= 8
    assert lengths[:3].mean() >= 2.0 and lengths[-20:].mean() <= 1.5
