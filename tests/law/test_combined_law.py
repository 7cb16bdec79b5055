"""The combined drafter is exact: whole decodes enumerated, so that what a session has learned decides about later rounds."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from specdiff_dist.config import DecodeConfig, Effort, Static
from specdiff_dist.core.rows import SparseRows
from specdiff_dist.core.speculation import FailFast, Policy
from specdiff_dist.drafters.combined import CombinedDrafter
from specdiff_dist.drafters.draft_choice import COPY, DIFFUSION, NOTHING
from specdiff_dist.types import DraftBlock, DraftCall
from tests.doubles import Direct, TableDrafter, TableVerifier, make_request, random_table
from tests.law.enumeration import Law, chunks, enumerate_paths, total_variation
from tests.law.test_exact_law import SAMPLED, target_law

PROMPT = (1, 0, 1)
VOCAB, LENGTH = 2, 6


class Watched(CombinedDrafter):
    """Counts how rounds drafted after which history of drafts, per committed text."""

    def __init__(self, inner: TableDrafter, **options) -> None:
        super().__init__(Direct(inner), **options)
        self.kinds: dict[tuple[int, ...], Counter[str]] = {}
        self._text: tuple[int, ...] = ()

    async def draft(self, call: DraftCall) -> DraftBlock:
        block = await super().draft(call)
        session = self._sessions.get(call.prefix.session_id)
        text = (*session.token_ids.tolist(), int(call.prefix.new_token_ids[-1]))
        chosen = session.cache.of_round(np.array(text, np.int32), call.num_draft_tokens)
        self.kinds.setdefault(text, Counter())[chosen] += 1
        return block


class ByTheSample(CombinedDrafter):
    """Looks at the sampled block before it chooses: copies instead where the sample begins with token 0 (trap 2)."""

    async def draft(self, call: DraftCall) -> DraftBlock:
        block = await self._inner.draft(call)
        if block.token_ids[0] != 0:
            return block
        tokens = np.ones(block.num_tokens, np.int32)
        return DraftBlock(tokens, SparseRows.one_hot(tokens), block.confidences, block.max_probs, block.cached_len)


def whole_law(
    monkeypatch: pytest.MonkeyPatch, drafter: CombinedDrafter, config: DecodeConfig, length: int = LENGTH
) -> tuple[Law, Law]:
    """The system's joint law of `length` tokens over all rounds, and the verifier's."""
    table = random_table(VOCAB, 9)
    verifier = TableVerifier(table, VOCAB)
    request = make_request(PROMPT, max_tokens=length, temperature=1.0)

    def run() -> tuple[int, ...]:
        got = chunks(request, config, drafter, verifier, first=False)
        return tuple(token for chunk in got for token in chunk.token_ids)

    return enumerate_paths(monkeypatch, run), target_law(table, length, SAMPLED, PROMPT)


@pytest.mark.parametrize(
    ("policy", "effort", "cost", "expected"),
    [
        (Static(2), Effort(1), 0.0, {COPY, DIFFUSION}),
        (Static(2), Effort(2), 0.0, {COPY, DIFFUSION}),
        (FailFast(0.0, 1, 2, "max_prob"), Effort(1), 0.0, {COPY, DIFFUSION}),
        (Static(2), Effort(1), 0.02, {COPY, DIFFUSION, NOTHING}),
    ],
    ids=["static", "two steps", "two calls a round", "sometimes nothing"],
)
def test_choosing_before_anything_is_drafted_is_exact(
    monkeypatch: pytest.MonkeyPatch, policy: Policy, effort: Effort, cost: float, expected: set[str]
) -> None:
    drafter = Watched(
        TableDrafter(VOCAB, 4), expected_acceptance=(0.29,), draft_cost=cost, token_cost=0.25 if cost else 0.0
    )
    got, target = whole_law(monkeypatch, drafter, DecodeConfig(policy=policy, effort=effort), LENGTH + (cost > 0))
    assert sum(got.values()) == pytest.approx(1.0, abs=1e-12)
    assert total_variation(got, target) < 1e-12
    totals = sum(drafter.kinds.values(), Counter())
    assert set(totals) == expected and min(totals.values()) > 100  # all kinds of rounds were walked …
    # … and after one and the same text, depending on what was drafted and rejected on the way there
    assert any(len(kinds) == 2 for kinds in drafter.kinds.values())


def test_choosing_by_the_sampled_block_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = ByTheSample(Direct(TableDrafter(VOCAB, 4)))
    got, target = whole_law(monkeypatch, drafter, DecodeConfig(policy=Static(2)), 3)
    assert total_variation(got, target) > 1e-3
