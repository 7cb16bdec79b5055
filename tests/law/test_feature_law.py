"""A drafter that is told the verifier's features is exact: whole decodes enumerated, so that features of tokens accepted
and drawn in earlier rounds decide what later ones propose.

Why: features are a function of the committed tokens, a round's history, which is over before the round draws its first
number; and its proposals are recorded as drawn. The features of rejected drafts never reach the drafter.
"""

from __future__ import annotations

import pytest

from specdiff_dist.config import DecodeConfig, Effort, Static
from specdiff_dist.types import DraftCall
from tests.doubles import FeatureDrafter, TableVerifier, make_request, random_table
from tests.law.enumeration import chunks, enumerate_paths, total_variation
from tests.law.test_exact_law import SAMPLED, target_law

VOCAB, LENGTH, PROMPT = 2, 4, (1, 0)


class Counting(FeatureDrafter):
    num_calls = 0

    def draft(self, call: DraftCall):
        Counting.num_calls += 1
        return super().draft(call)


def test_proposals_may_depend_on_features_of_committed_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    table = random_table(VOCAB, 9)
    verifier = TableVerifier(table, VOCAB, num_layers=6)
    drafter = Counting(VOCAB, seed=4)
    request = make_request(PROMPT, max_tokens=LENGTH, temperature=1.0)
    config = DecodeConfig(policy=Static(2), effort=Effort(1))

    def run() -> tuple[int, ...]:
        got = chunks(request, config, drafter, verifier, first=False)
        return tuple(token for chunk in got for token in chunk.token_ids)

    law = enumerate_paths(monkeypatch, run)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    assert total_variation(law, target_law(table, LENGTH, SAMPLED, PROMPT)) < 1e-12
    assert drafter.num_calls > 50 and drafter.num_told > 100
