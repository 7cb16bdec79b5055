"""K12: penalties, biases and filters are part of the target's law, and drafts obey it: the joint law of the real loop,
with a drafter that knows nothing of them, enumerated against the plain processed law.

The verifier's rows come from the real code (verifiers/target_rows.py); what they should be, from tests/plain_logits.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specdiff_dist.config import DecodeConfig, Effort, Linear, Off, Static
from specdiff_dist.core.logit_processing import LogitProcessing
from specdiff_dist.types import SamplingParams, TargetRows, VerifyCall
from specdiff_dist.verifiers.target_rows import target_rows
from tests.doubles import (
    Logits,
    ScriptedDrafter,
    TableDrafter,
    TableVerifier,
    make_request,
    processed_probs,
    random_table,
)  # fmt: skip
from tests.law.enumeration import Law, chunks, enumerate_paths, total_variation
from tests.plain_logits import plain_processed

VOCAB, LENGTH, PROMPT = 3, 3, (1, 0, 1)
EOS = 2
SAMPLED = SamplingParams(1.0)
ROUNDING = 1e-6  # the rows are float32
PROCESSINGS = [
    LogitProcessing(frequency_penalty=1.5),
    LogitProcessing(presence_penalty=-2.0),
    LogitProcessing(repetition_penalty=1.7),
    LogitProcessing(bias_token_ids=(0, 2), biases=(1.5, -0.5)),
    LogitProcessing(min_tokens=2),
    LogitProcessing(allowed_token_ids=(0, 2)),
    LogitProcessing(-0.6, 0.9, 0.8, (1,), (0.4,), min_tokens=1, allowed_token_ids=(1, 2)),
]


class RealRows(TableVerifier):
    """A table verifier whose rows the real code makes."""

    def verify(self, call: VerifyCall) -> TargetRows:
        cached_len = super().verify(call).cached_len
        tokens = tuple(self._sessions.get(call.prefix.session_id).token_ids.tolist())
        logits = [self._logits(tokens[: call.prefix.num_committed + i]) for i in range(len(call.draft_token_ids) + 1)]
        return target_rows(torch.from_numpy(np.stack(logits)), call, cached_len=cached_len, token_ids=np.array(tokens))


def plain_law(table: Logits, processing: LogitProcessing | None, sampling: SamplingParams = SAMPLED) -> Law:
    """The verifier alone, token by token, until EOS or LENGTH tokens."""
    law: Law = {}
    pending: Law = {(): 1.0}
    while pending:
        done, weight = pending.popitem()
        row = plain_processed(table(PROMPT + done), processing, PROMPT, done, (EOS,))
        probs = processed_probs(row, sampling).astype(np.float64)
        for token in np.flatnonzero(probs).tolist():
            longer = (*done, token)
            to = law if token == EOS or len(longer) == LENGTH else pending
            to[longer] = to.get(longer, 0.0) + weight * float(probs[token] / probs.sum())
    return law


def loop_law(
    monkeypatch: pytest.MonkeyPatch,
    table: Logits,
    processing: LogitProcessing | None,
    drafter: Any,
    config: DecodeConfig,
    sampling: SamplingParams = SAMPLED,
) -> Law:
    """Whole decodes: rounds after the first state what earlier ones committed."""
    verifier = RealRows(table, VOCAB, eos_token_ids=(EOS,))
    request = make_request(
        PROMPT, max_tokens=LENGTH, temperature=sampling.temperature, top_k=sampling.top_k, processing=processing
    )

    def run() -> tuple[int, ...]:
        got = chunks(request, config, drafter, verifier, first=False)
        return tuple(token for chunk in got for token in chunk.token_ids)

    return enumerate_paths(monkeypatch, run)


@pytest.mark.parametrize("processing", PROCESSINGS, ids=str)
@pytest.mark.parametrize("effort", [Effort(1), Effort(2)], ids=str)
def test_the_loops_law_is_the_processed_targets(
    monkeypatch: pytest.MonkeyPatch, processing: LogitProcessing, effort: Effort
) -> None:
    table = random_table(VOCAB, 5)
    config = DecodeConfig(effort=effort, policy=Static(2))
    got = loop_law(monkeypatch, table, processing, TableDrafter(VOCAB), config)
    assert sum(got.values()) == pytest.approx(1.0, abs=1e-12)
    assert total_variation(got, plain_law(table, processing)) < ROUNDING
    assert total_variation(got, plain_law(table, None)) > 1e-2  # it does change the law


@pytest.mark.parametrize("sampling", [SamplingParams(0.6, top_k=2), SamplingParams(0.0)], ids=str)
@pytest.mark.parametrize("processing", [PROCESSINGS[0], PROCESSINGS[2], PROCESSINGS[-1]], ids=str)
def test_temperature_and_truncation_come_after_it(
    monkeypatch: pytest.MonkeyPatch, processing: LogitProcessing, sampling: SamplingParams
) -> None:
    table = random_table(VOCAB, 7)
    for config in (DecodeConfig(policy=Static(2)), DecodeConfig(policy=Off())):
        got = loop_law(monkeypatch, table, processing, TableDrafter(VOCAB), config, sampling)
        assert total_variation(got, plain_law(table, processing, sampling)) < ROUNDING


def test_a_verifier_blind_to_the_drafts_in_the_block_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault of SGLang issue 28180: penalties that know the committed tokens alone."""

    class Blind(RealRows):
        def verify(self, call: VerifyCall) -> TargetRows:
            target = TableVerifier.verify(self, call)
            tokens = self._sessions.get(call.prefix.session_id).token_ids.tolist()
            first = call.prefix.num_committed
            output = tokens[call.num_prompt_tokens : first]
            rows = [
                plain_processed(self._logits(tuple(tokens[: first + i])), call.processing, PROMPT, output)
                for i in range(len(call.draft_token_ids) + 1)
            ]
            probs = np.concatenate([processed_probs(row, call.sampling) for row in rows])
            target.rows.probs[:] = probs
            return target

    processing, table = LogitProcessing(frequency_penalty=2.0), random_table(VOCAB, 5)
    monkeypatch.setitem(globals(), "RealRows", Blind)
    got = loop_law(monkeypatch, table, processing, TableDrafter(VOCAB), DecodeConfig(policy=Static(2)))
    assert total_variation(got, plain_law(table, processing)) > 1e-2


@pytest.mark.parametrize("rule", [Linear(0.7), Linear(1.0)], ids=str)
def test_no_rule_lets_a_forbidden_draft_through(monkeypatch: pytest.MonkeyPatch, rule: Linear) -> None:
    """Where tokens are forbidden decoding is exact, whatever the tier; after min_tokens the rule is itself again."""
    table = random_table(VOCAB, 5)
    drafter = ScriptedDrafter(lambda prefix, n: [EOS] * n, VOCAB)
    config = DecodeConfig(rule=rule, policy=Static(2))
    for processing in (LogitProcessing(min_tokens=2), LogitProcessing(allowed_token_ids=(0, 1))):
        got = loop_law(monkeypatch, table, processing, drafter, config)
        if processing.min_tokens:
            assert all(len(tokens) == LENGTH for tokens, weight in got.items() if weight > 0)
            assert sum(weight for tokens, weight in got.items() if tokens[-1] == EOS) > 0
        else:
            assert total_variation(got, plain_law(table, processing)) < ROUNDING
    assert loop_law(monkeypatch, table, None, drafter, config)[(EOS,)] > 0.5  # the drafter's wish without a filter
