"""K12: what a request asks to be done to logits holds on every path, drafted or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from specdiff_dist.config import DecodeConfig, Linear, Off, Static
from specdiff_dist.core.logit_processing import LogitProcessing
from specdiff_dist.core.rows import find
from specdiff_dist.drafters.block_diffusion import BlockDiffusionDrafter
from specdiff_dist.drafters.prompt_lookup import PromptLookupDrafter
from specdiff_dist.engine import decode
from specdiff_dist.errors import InvalidRequest
from specdiff_dist.types import GenerateRequest, TargetRows, TokenChunk, VerifyCall
from specdiff_dist.verifiers.causal_lm import CausalLMVerifier
from specdiff_dist.verifiers.transformers_forward import TransformersForward
from tests.chunks import tokens_of
from tests.doubles import Direct, ScriptedDrafter, TableVerifier, greedy_script, make_request, random_table
from tests.plain_logits import plain_processed
from tests.tiny_models import VOCAB_SIZE, block_model, tiny_llama

VOCAB = 24
TABLE = random_table(VOCAB, order=2)  # few contexts: greedy answers run into loops
PROMPT = (5, 3, 9)
DRAFTING, PLAIN = DecodeConfig(policy=Static(4)), DecodeConfig(policy=Off())


async def run(request: GenerateRequest, config: DecodeConfig, drafter: Any, verifier: Any) -> list[TokenChunk]:
    stream = decode(request, config, Direct(drafter), Direct(verifier), tier="exact")
    return [chunk async for chunk in stream]


def accepted(chunks: list[TokenChunk]) -> int:
    receipt = chunks[-1].receipt
    assert receipt is not None and receipt.exact
    return receipt.num_accepted_tokens


def processed_greedy(processing: LogitProcessing, num_tokens: int, ending: tuple[int, ...] = ()) -> list[int]:
    """The plain run, by code of its own."""
    output: list[int] = []
    while len(output) < num_tokens and not (output and output[-1] in ending):
        row = plain_processed(TABLE((*PROMPT, *output)), processing, PROMPT, output, ending)
        output.append(int(np.argmax(row)))
    return output


async def test_frequency_penalty_of_either_sign_equals_its_plain_run() -> None:
    """Row 61, on a text that loops."""
    texts = []
    for penalty in (1.5, -1.5, 0.0):
        processing = LogitProcessing(frequency_penalty=penalty)
        request = make_request(PROMPT, max_tokens=60, processing=processing)
        drafted = await run(
            request, DRAFTING, ScriptedDrafter(greedy_script(TABLE), VOCAB), TableVerifier(TABLE, VOCAB)
        )
        plain = await run(request, PLAIN, ScriptedDrafter(greedy_script(TABLE), VOCAB), TableVerifier(TABLE, VOCAB))
        assert tokens_of(drafted) == tokens_of(plain) == processed_greedy(processing, 60)
        assert accepted(drafted) > 0
        texts.append(tuple(tokens_of(drafted)))
    assert len(set(texts)) == 3


@pytest.mark.parametrize("make_drafter", [
    lambda model: BlockDiffusionDrafter(block_model(model), name="tiny"),
    lambda model: PromptLookupDrafter(vocab_size=VOCAB_SIZE, max_model_len=256),
])  # fmt: skip
async def test_repetition_penalty_with_a_drafter_that_ignores_it(make_drafter: Callable[[Any], Any]) -> None:
    """Row 63, on real networks: equal to the plain run, and to transformers' own generate with that penalty."""
    model = tiny_llama()
    prompt = [1, 7, 7, 30, 7, 30, 12]
    processing = LogitProcessing(repetition_penalty=1.3)
    request = make_request(prompt, max_tokens=40, processing=processing)
    texts = []
    for config in (DRAFTING, PLAIN):
        verifier = CausalLMVerifier(TransformersForward(model), name="tiny")
        texts.append(await run(request, config, make_drafter(model), verifier))
    drafted, plain = texts
    ids: Any = torch.tensor([prompt])
    out: Any = model.generate(  # pyright: ignore
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, repetition_penalty=1.3,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert tokens_of(drafted) == tokens_of(plain) == out[0, len(prompt) :].tolist()
    receipt = drafted[-1].receipt
    assert receipt is not None and receipt.num_draft_tokens > 20


class Watched(TableVerifier):
    """Notes what the target's rows say of one token, by the number of tokens generated before."""

    def __init__(self, token: int, **options: Any) -> None:
        super().__init__(TABLE, VOCAB, eos_token_ids=(token,), **options)
        self.token, self.seen = token, {}

    def verify(self, call: VerifyCall) -> TargetRows:
        target = super().verify(call)
        num_rows = target.rows.num_rows
        at, is_there = find(target.rows, np.arange(num_rows), np.full(num_rows, self.token))
        for row in range(num_rows):
            is_possible = bool(is_there[row]) and float(target.rows.probs[at[row]]) > 0.0
            self.seen.setdefault(call.prefix.num_committed + row - len(PROMPT), set()).add(is_possible)
        return target


@pytest.mark.parametrize("config", [DRAFTING, DecodeConfig(Linear(0.9), policy=Static(4))], ids=["exact", "lossy"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_min_tokens_with_a_drafter_that_wants_to_stop_at_once(config: DecodeConfig, temperature: float) -> None:
    """Row 65: at least 10 tokens, EOS has probability 0 at positions 0 … 9 and only there."""
    eos = 7
    for seed in range(10):
        verifier = Watched(eos)
        drafter = ScriptedDrafter(lambda prefix, n: [eos] * n, VOCAB)
        request = make_request(
            PROMPT, max_tokens=40, temperature=temperature, seed=seed, processing=LogitProcessing(min_tokens=10)
        )
        tokens = tokens_of(await run(request, config, drafter, verifier))
        assert len(tokens) >= 10 and eos not in tokens[:10]
        assert {False} == set.union(*(verifier.seen[n] for n in range(10)))
        if temperature and len(tokens) > 10:
            assert {True} == set.union(*(seen for n, seen in verifier.seen.items() if n >= 10))
        if not config.rule.leniency and not temperature:
            assert tokens == processed_greedy(LogitProcessing(min_tokens=10), 40, (eos,))


async def test_stop_token_ids_are_forbidden_too_and_ignored_eos_is_not() -> None:
    request = make_request(
        PROMPT, max_tokens=30, temperature=1.0, stop_token_ids=(3, 4), ignore_eos=True,
        processing=LogitProcessing(min_tokens=30),
    )  # fmt: skip
    verifier = TableVerifier(TABLE, VOCAB, eos_token_ids=(7,))
    chunks = await run(request, DRAFTING, ScriptedDrafter(greedy_script(TABLE), VOCAB), verifier)
    assert not {3, 4} & set(tokens_of(chunks)) and len(tokens_of(chunks)) == 30
    assert {call.ending_token_ids for call in verifier.calls} == {(3, 4)}


@pytest.mark.parametrize("wide", [False, True])
async def test_only_allowed_tokens_come_in_every_tier(wide: bool) -> None:
    processing = LogitProcessing(allowed_token_ids=(2, 4, 6))
    for rule in (DRAFTING.rule, Linear(1.0)):
        config = DecodeConfig(rule, policy=Static(4))
        request = make_request(PROMPT, max_tokens=40, temperature=1.0, processing=processing)
        drafter = ScriptedDrafter(greedy_script(TABLE), VOCAB)
        chunks = await run(request, config, drafter, TableVerifier(TABLE, VOCAB, wide=wide))
        assert set(tokens_of(chunks)) <= {2, 4, 6}


async def test_a_replica_that_loses_the_session_changes_nothing() -> None:
    """Everything is stated in every call: a rebuilt verifier gives the same rows."""

    class Forgetful(TableVerifier):
        def verify(self, call: VerifyCall) -> TargetRows:
            if call.prefix.round_index % 3 == 2 and call.prefix.prefix_len:
                self.release(call.prefix.session_id)
            return super().verify(call)

    processing = LogitProcessing(0.8, 0.3, 1.2, (4,), (2.0,), min_tokens=12)
    request = make_request(PROMPT, max_tokens=40, temperature=0.9, top_k=6, seed=4, processing=processing)
    answers = []
    for kind in (TableVerifier, Forgetful):
        drafter = ScriptedDrafter(greedy_script(TABLE), VOCAB)
        chunks = await run(request, DRAFTING, drafter, kind(TABLE, VOCAB, eos_token_ids=(7,)))
        receipt = chunks[-1].receipt
        assert receipt is not None and (receipt.verifier_rebuilds > 3) == (kind is Forgetful)
        answers.append(tokens_of(chunks))
    assert answers[0] == answers[1]


async def test_calls_state_what_is_left_to_do_and_no_more() -> None:
    verifier = TableVerifier(TABLE, VOCAB, eos_token_ids=(7,))
    request = make_request(PROMPT, max_tokens=30, processing=LogitProcessing(min_tokens=10))
    await run(request, DRAFTING, ScriptedDrafter(greedy_script(TABLE), VOCAB), verifier)
    early = [call for call in verifier.calls if call.prefix.num_committed - len(PROMPT) < 10]
    assert early and all((call.num_prompt_tokens, call.ending_token_ids) == (len(PROMPT), (7,)) for call in early)
    late = verifier.calls[len(early) :]
    assert late and all(
        (call.processing, call.num_prompt_tokens, call.ending_token_ids) == (None, 0, ()) for call in late
    )


@pytest.mark.parametrize(
    ("processing", "param"),
    [
        (LogitProcessing(bias_token_ids=(VOCAB,), biases=(1.0,)), "logit_bias"),
        (LogitProcessing(allowed_token_ids=(VOCAB,)), "allowed_token_ids"),
        (LogitProcessing(allowed_token_ids=(7,), min_tokens=1), "min_tokens"),
    ],
)
async def test_what_no_verifier_could_serve_is_refused_before_the_first_call(processing, param) -> None:
    verifier = TableVerifier(TABLE, VOCAB, eos_token_ids=(7,))
    with pytest.raises(InvalidRequest) as refused:
        await run(
            make_request(PROMPT, processing=processing), PLAIN, ScriptedDrafter(greedy_script(TABLE), VOCAB), verifier
        )
    assert refused.value.param == param
    assert verifier.calls == []


def test_min_tokens_beyond_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        make_request(PROMPT, max_tokens=4, processing=LogitProcessing(min_tokens=5))
    assert refused.value.param == "min_tokens"
