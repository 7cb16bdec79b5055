"""Features are the hidden states that transformers names, however the tokens arrive."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdiff_dist.verifiers import load_verifier
from specdiff_dist.verifiers.causal_lm import CausalLMVerifier
from specdiff_dist.verifiers.features import features_tensor, wire_features
from specdiff_dist.verifiers.llama_forward import LlamaForward
from specdiff_dist.verifiers.transformers_forward import TransformersForward
from tests.tiny_models import HIDDEN_SIZE, VOCAB_SIZE, save_verifier, tiny_llama
from tests.verifiers.test_causal_lm import make_call

LAYERS = (0, 2, 3)
TOKENS = np.random.default_rng(0).integers(0, VOCAB_SIZE, 23).tolist()


@torch.inference_mode()
def expected(model: Any, tokens: list[int]) -> np.ndarray:
    """After layers 0, 2 and the last, 3: its output goes into the final norm."""
    entering: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda module, inputs: entering.append(inputs[0]))
    states = model(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states
    hook.remove()
    return torch.cat([states[1], states[3], entering[0]], dim=-1)[0].float().numpy()


@pytest.fixture(params=["own", "transformers"])
def engine(request, tmp_path) -> tuple[Any, CausalLMVerifier]:
    model = tiny_llama(num_hidden_layers=4)
    if request.param == "transformers":
        return model, CausalLMVerifier(TransformersForward(model), name="tiny", prefill_chunk=5)
    loaded: Any = load_verifier(str(save_verifier(tmp_path, model)), dtype="float32", device="cpu")
    assert isinstance(loaded._model, LlamaForward)
    return model, CausalLMVerifier(loaded._model, name="tiny", prefill_chunk=5)


def asking(start: int, *args: Any, **options: Any) -> Any:
    return dataclasses.replace(make_call(*args, **options), feature_layers=LAYERS, feature_start=start)


def test_of_every_token_through_chunks_rollback_and_rebuilding(engine):
    model, verifier = engine
    assert (verifier.info.num_layers, verifier.info.hidden_size) == (4, HIDDEN_SIZE)

    def check(features: Any, tokens: list[int], start: int) -> None:
        assert features.dtype == np.float16 and features.shape == (len(tokens) - start, 3 * HIDDEN_SIZE)
        np.testing.assert_allclose(features, expected(model, tokens)[start:], rtol=2e-3, atol=2e-3)

    check(verifier.verify(asking(0, TOKENS[:17], [1, 2])).features, [*TOKENS[:17], 1, 2], 0)
    kept = verifier.verify(asking(18, [*TOKENS[:17], 1, 9], [3], cached=18, round_index=1))
    check(kept.features, [*TOKENS[:17], 1, 9, 3], 18)
    verifier.release("s")
    again = verifier.verify(
        asking(18, [*TOKENS[:17], 1, 9], [3], round_index=1)
    )  # recomputed, only the wanted ones told
    check(again.features, [*TOKENS[:17], 1, 9, 3], 18)
    assert verifier.verify(asking(21, TOKENS[:21], [], session="t")).features.shape == (0, 3 * HIDDEN_SIZE)


def test_rows_are_the_same_with_and_without(engine):
    _, verifier = engine
    plain, asked = (
        verifier.verify(make_call(TOKENS, [4, 5], session="a")), verifier.verify(asking(0, TOKENS, [4, 5], session="b"))
    )  # fmt: skip
    assert plain.features is None
    np.testing.assert_array_equal(plain.rows.probs, asked.rows.probs)


def test_bfloat16_travels_as_its_bits_and_large_numbers_are_cut():
    states = torch.tensor([[1.0, -2.5, 70000.0]])
    bits = wire_features(states.bfloat16())
    assert bits.dtype == np.uint16 and torch.equal(features_tensor(bits), states.bfloat16())
    halves = wire_features(states)
    assert halves.dtype == np.float16 and halves.tolist() == [[1.0, -2.5, 65504.0]]
    assert features_tensor(halves).tolist() == halves.tolist()
    assert np.isnan(wire_features(torch.tensor([[torch.nan]]))).all()
