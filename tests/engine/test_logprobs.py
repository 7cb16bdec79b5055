"""K09: logprobs are the target's own log-softmax, whatever drafted, accepted or recovered a token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdiff_dist.config import DecodeConfig, Linear, Off, Static
from specdiff_dist.core.logit_processing import LogitProcessing
from specdiff_dist.core.rules import Cactus
from specdiff_dist.engine import decode
from specdiff_dist.errors import InvalidRequest, InvalidRows
from specdiff_dist.types import ResolveCall, ResolvedToken, TokenChunk
from tests.doubles import Direct, ScriptedDrafter, TableVerifier, greedy_script, make_request, random_table
from tests.plain_logits import log_softmax

VOCAB = 24
TABLE = random_table(VOCAB, order=3)
PROMPT = (5, 3, 9)
EOS = 7


async def run(config: DecodeConfig, verifier: Any, drafter: Any = None, **fields: Any) -> list[TokenChunk]:
    drafter = drafter or ScriptedDrafter(greedy_script(TABLE), VOCAB)
    request = make_request(PROMPT, **{"max_tokens": 40, "temperature": 0.8, "seed": 3, "num_logprobs": 3, **fields})
    return [chunk async for chunk in decode(request, config, Direct(drafter), Direct(verifier), tier="test")]


def check(chunks: list[TokenChunk], num_top: int = 3) -> None:
    """Every token has a value, and it is the log-softmax after the same prefix."""
    output: list[int] = []
    for chunk in chunks:
        assert len(chunk.logprobs) == len(chunk.token_ids)
        for token, reported in zip(chunk.token_ids, chunk.logprobs, strict=True):
            expected = log_softmax(TABLE((*PROMPT, *output)))
            best = np.argsort(-expected, kind="stable")[:num_top]
            assert reported.logprob == pytest.approx(expected[token], abs=1e-3)
            assert list(reported.top_token_ids) == best.tolist()
            assert list(reported.top_logprobs) == pytest.approx(expected[best].tolist(), abs=1e-3)
            output.append(token)
    assert output


CONFIGS = {
    "drafting": DecodeConfig(policy=Static(4)),
    "off": DecodeConfig(policy=Off()),
    "lossy": DecodeConfig(Linear(0.6), policy=Static(4)),
    "cactus": DecodeConfig(Cactus(0.5), policy=Static(4)),  # wide rows: some tokens are resolved
}


@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize("name", CONFIGS)
async def test_values_are_the_targets_own_with_and_without_a_drafter(name: str, wide: bool) -> None:
    """Row 49; penalties and temperature change the tokens and not what is reported of them."""
    for processing in (None, LogitProcessing(frequency_penalty=1.5)):
        chunks = await run(CONFIGS[name], TableVerifier(TABLE, VOCAB, wide=wide), processing=processing)
        check(chunks)
        assert max(reported.logprob for chunk in chunks for reported in chunk.logprobs) < -1e-3  # none claims certainty


@pytest.mark.parametrize(
    "fields", [{"temperature": 0.0}, {"top_k": 4}, {"num_logprobs": 0}, {"num_logprobs": 20}], ids=str
)
async def test_under_any_sampling_parameters(fields: dict[str, Any]) -> None:
    for name in ("drafting", "off", "lossy"):
        check(await run(CONFIGS[name], TableVerifier(TABLE, VOCAB), **fields), fields.get("num_logprobs", 3))


async def test_a_lossy_draft_outside_a_truncated_target_has_its_value() -> None:
    drafter = ScriptedDrafter(lambda prefix, n: [(sum(prefix) + i) % VOCAB for i in range(n)], VOCAB)
    chunks = await run(DecodeConfig(Linear(0.9), policy=Static(4)), TableVerifier(TABLE, VOCAB), drafter, top_k=2)
    check(chunks)
    assert sum(reported.logprob < -2.0 for chunk in chunks for reported in chunk.logprobs) > 5


async def test_nothing_is_reported_of_tokens_after_the_end() -> None:
    """K03 row 19: EOS in the middle of an accepted block."""
    table = lambda prefix: np.eye(VOCAB, dtype=np.float32)[(prefix[-1] + 1) % VOCAB] * 9  # noqa: E731
    verifier = TableVerifier(table, VOCAB, eos_token_ids=(12,))
    drafter = ScriptedDrafter(greedy_script(table), VOCAB)
    chunks = await run(DecodeConfig(policy=Static(6)), verifier, drafter, temperature=0.0)
    assert [token for chunk in chunks for token in chunk.token_ids] == [10, 11, 12]
    assert sum(len(chunk.logprobs) for chunk in chunks) == 3


async def test_none_are_asked_for_by_default() -> None:
    verifier = TableVerifier(TABLE, VOCAB)
    chunks = await run(CONFIGS["drafting"], verifier, num_logprobs=None)
    assert all(chunk.logprobs == () for chunk in chunks)
    assert all(call.num_logprobs is None for call in verifier.calls)


async def test_a_resolved_token_without_its_value_is_an_error() -> None:
    class Silent(TableVerifier):
        def resolve(self, call: ResolveCall) -> ResolvedToken:
            return ResolvedToken(super().resolve(call).token_id)

    with pytest.raises(InvalidRows, match="logprobs"):
        await run(CONFIGS["cactus"], Silent(TABLE, VOCAB, wide=True))


def test_more_than_the_limit_is_refused() -> None:
    for wrong in (-1, 21, 2**31 - 1):
        with pytest.raises(InvalidRequest) as refused:
            make_request(PROMPT, num_logprobs=wrong)
        assert refused.value.param == "logprobs"
