"""K16: drafter and verifier that do not agree on the vocabulary's size: padded output matrices, larger relatives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdiff_dist.config import DecodeConfig, Static
from specdiff_dist.engine import decode
from specdiff_dist.transport.local import LocalDrafter, LocalVerifier
from specdiff_dist.types import Receipt
from tests.doubles import Logits, ScriptedDrafter, TableDrafter, TableVerifier, make_request, plain_greedy, random_table

REAL, PADDED = 100, 104
PROMPT = (5, 17, 99)


def padded_table() -> Logits:
    """The padding's logits are as large as any, as those of an untrained output matrix may be; it is masked where the real
    size is known, that is, in the verifier."""
    table = random_table(PADDED, 2, order=3)

    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        row = table(prefix).copy()
        row[REAL:] = -1e9  # what a verifier makes of it: `vocab_size` of its forward is the real one
        return row

    return logits


async def answer(drafter: Any, verifier: Any, **options: Any) -> tuple[list[int], Receipt]:
    local_drafter, local_verifier = LocalDrafter(drafter), LocalVerifier(verifier)
    request = make_request(PROMPT, max_tokens=60, **options)
    chunks = [
        chunk
        async for chunk in decode(request, DecodeConfig(policy=Static(4)), local_drafter, local_verifier, tier="exact")
    ]
    await local_drafter.close()
    await local_verifier.close()
    assert chunks[-1].receipt is not None
    return [token for chunk in chunks for token in chunk.token_ids], chunks[-1].receipt


@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
async def test_a_target_padded_beyond_the_drafters_vocabulary(wide):
    """Proposals name tokens, so that they are zero on the padding without being extended; no padding is ever emitted."""
    tokens, receipt = await answer(
        TableDrafter(REAL, 3), TableVerifier(padded_table(), PADDED, wide=wide), temperature=1.0, seed=4
    )
    assert max(tokens) < REAL
    assert not receipt.degraded and receipt.exact and receipt.num_accepted_tokens > 0


async def test_greedy_it_is_the_plain_answer():
    table = padded_table()
    script = ScriptedDrafter(lambda prefix, num: plain_greedy(table, prefix, num), REAL)
    tokens, receipt = await answer(script, TableVerifier(table, PADDED))
    assert tokens == plain_greedy(table, PROMPT, 60)
    assert not receipt.degraded and receipt.draft_acceptance_rate == 1.0


async def test_a_token_the_drafter_has_never_heard_of_ends_drafting_not_the_answer():
    """A larger verifier says token 101 at some point: from there on its drafter cannot follow."""
    table = random_table(PADDED, 2, order=3)
    expected = plain_greedy(table, PROMPT, 60)
    first = next(index for index, token in enumerate(expected) if token >= REAL)
    assert 0 < first < 50, "the table says one in time"
    script = ScriptedDrafter(lambda prefix, num: [min(t, REAL - 1) for t in plain_greedy(table, prefix, num)], REAL)
    tokens, receipt = await answer(script, TableVerifier(table, PADDED))
    assert tokens == expected
    assert receipt.degraded and receipt.num_accepted_tokens > 0


async def test_a_drafter_of_a_larger_vocabulary_may_say_what_the_verifier_has_not():
    """Such a draft costs its round."""
    table = random_table(REAL, 2, order=3)
    script = ScriptedDrafter(lambda prefix, num: [REAL + 2 if len(prefix) % 2 else 7] * num, PADDED)
    tokens, receipt = await answer(script, TableVerifier(table, REAL))
    assert tokens == plain_greedy(table, PROMPT, 60)
    assert receipt.degraded and receipt.exact
