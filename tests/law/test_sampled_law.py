"""The real pair against the verifier's own law: 2,000 runs of one prompt's first three tokens (slow)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from specdiff_dist.config import DecodeConfig, Effort, Linear, Lossless, Rule, Static
from specdiff_dist.models import ModelFolder
from specdiff_dist.types import prefix_crc
from tests.doubles import make_request
from tests.law.enumeration import chunks

MIN_EXPECTED = 5.0
QUESTION = "Name a colour."


def verifier_law(
    folder: ModelFolder, prompt: list[int], temperature: float, top_k: int, num_runs: int
) -> dict[tuple[int, ...], float]:
    """Joint law of three tokens by transformers' own forward and warpers; branches too rare to test are left out."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper

    model = AutoModelForCausalLM.from_pretrained(folder.path, dtype=torch.float32)
    law: dict[tuple[int, ...], float] = {}

    def extend(tokens: tuple[int, ...], weight: float) -> None:
        if len(tokens) == 3:
            law[tokens] = weight
            return
        ids: Any = torch.tensor([prompt + list(tokens)])
        with torch.inference_mode():
            scores = model(ids).logits[:, -1].float()
        scores = TopKLogitsWarper(top_k)(ids, TemperatureLogitsWarper(temperature)(ids, scores))
        probs = torch.softmax(scores, -1)[0].double()
        for token in torch.nonzero(probs).flatten().tolist():
            if weight * float(probs[token]) * num_runs >= MIN_EXPECTED:
                extend((*tokens, token), weight * float(probs[token]))

    extend((), 1.0)
    return law


def p_value(law: dict[tuple[int, ...], float], seen: Counter[tuple[int, ...]]) -> float:
    """Chi-square over the common continuations, everything else pooled into one cell."""
    total = sum(seen.values())
    expected = np.array([*law.values(), 1.0 - sum(law.values())]) * total
    observed = np.array([seen[key] for key in law] + [total - sum(seen[key] for key in law)], float)
    keep = expected >= MIN_EXPECTED
    observed = np.append(observed[keep], observed[~keep].sum())
    expected = np.append(expected[keep], expected[~keep].sum())
    cells = expected > 0
    return float(stats.chisquare(observed[cells], expected[cells]).pvalue)


class SharedPrompt:
    """An engine that serves every run from one session, so that the prompt is run once: it restates what a fresh session
    states (the whole prompt is new) as what is cached already, which is all that "the request states the prefix" needs.
    Features of the prompt that a later run asks the verifier for are the first run's; a drafter has them already."""

    def __init__(self, engine: Any, prompt: list[int]) -> None:
        self._engine, self._prompt, self._num_calls = engine, np.array(prompt, np.int32), 0
        self._features: Any = None  # of the prompt's tokens but the last
        self.info = engine.info

    def _restated(self, call: Any) -> Any:
        prefix, cached = call.prefix, len(self._prompt) - 1
        self._num_calls += 1
        if prefix.prefix_len < cached and self._num_calls > 1:
            tokens = np.concatenate([self._prompt[: prefix.prefix_len], prefix.new_token_ids])
            prefix = replace(
                prefix, prefix_len=cached, prefix_crc=prefix_crc(tokens[:cached]), new_token_ids=tokens[cached:]
            )
        return replace(call, prefix=replace(prefix, session_id="shared", round_index=self._num_calls))

    def draft(self, call: Any) -> Any:
        restated = self._restated(call)
        if call.features is not None:
            restated = replace(restated, features=call.features[restated.prefix.prefix_len - call.prefix.prefix_len :])
        return self._engine.draft(restated)

    def verify(self, call: Any) -> Any:
        restated, num_known = self._restated(call), len(self._prompt) - 1
        if not call.feature_layers:
            return self._engine.verify(restated)
        if self._features is None:
            reply = self._engine.verify(restated)
            self._features = reply.features[:num_known].copy()
            return reply
        start = max(call.feature_start, restated.prefix.prefix_len)
        reply = self._engine.verify(replace(restated, feature_start=start))
        known = self._features[call.feature_start : start]
        return replace(reply, features=np.concatenate([known, reply.features]))

    def release(self, session_id: str) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "effort", "num_runs", "is_right"),
    [
        (Lossless(), Effort(1), 2000, True),
        (Lossless(), Effort(2, "left_to_right"), 600, True),
        (Linear(0.3), Effort(1), 600, False),  # a wrong rule for this law: the test can fail
    ],
)
def test_first_three_tokens_follow_the_verifiers_law(
    embedded_model: ModelFolder, rule: Rule, effort: Effort, num_runs: int, is_right: bool
) -> None:
    from specdiff_dist.drafters import load_drafter
    from specdiff_dist.text.tokenizer import Tokenizer
    from specdiff_dist.verifiers import load_verifier

    tokenizer = Tokenizer.load(embedded_model.path)
    prompt = tokenizer.encode(
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )
    folder = str(embedded_model.path)
    verifier: Any = SharedPrompt(load_verifier(folder, dtype="float32", num_threads=2), prompt)
    drafter: Any = SharedPrompt(load_drafter("diffusion", verifier=folder, num_threads=2), prompt)
    config = DecodeConfig(rule=rule, effort=effort, policy=Static(2))
    seen: Counter[tuple[int, ...]] = Counter()
    num_accepted = 0
    for seed in range(num_runs):
        request = make_request(
            prompt, max_tokens=3, temperature=0.8, top_k=50, seed=seed, ignore_eos=True, request_id=str(seed)
        )
        got = chunks(request, config, drafter, verifier, first=False)
        seen[tuple(token for chunk in got for token in chunk.token_ids)] += 1
        receipt = got[-1].receipt
        assert receipt is not None
        num_accepted += receipt.num_accepted_tokens
    law = verifier_law(embedded_model, prompt, 0.8, 50, num_runs)
    value = p_value(law, seen)
    print(f"\n{rule} {effort}: p = {value:.4g}, {len(law)} cells, {num_accepted / num_runs:.2f} accepted per run")
    assert num_accepted > 0.1 * num_runs  # the acceptance path was really taken
    assert (value > 0.001) == is_right
