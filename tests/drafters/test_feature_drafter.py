"""The drafter that is told the verifier's features: its keys and values, and whole answers with a real verifier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specdiff_dist.config import DecodeConfig, Effort, Static
from specdiff_dist.drafters import load_drafter
from specdiff_dist.drafters.block_model import MASK_ID, BlockModel
from specdiff_dist.engine import decode
from specdiff_dist.errors import InvalidConfig, InvalidRequest
from specdiff_dist.train.start import Start, from_verifier, with_features
from specdiff_dist.types import DraftCall, PrefixStatement, SamplingParams, TokenChunk, prefix_crc
from specdiff_dist.verifiers import load_verifier
from specdiff_dist.verifiers.forward import forward_one
from specdiff_dist.verifiers.llama_forward import LlamaForward
from tests.chunks import tokens_of
from tests.doubles import Direct, make_request, plain_greedy
from tests.tiny_models import VOCAB_SIZE, save_start, save_verifier, tiny_llama

LAYERS = (0, 2, 3)  # of the verifier, as the drafter's
TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5])


@pytest.fixture(scope="module")
def verifier_folder(tmp_path_factory) -> Path:
    return save_verifier(tmp_path_factory.mktemp("verifier"), tiny_llama(num_hidden_layers=4))


def start_of(folder: Path) -> Start:
    return with_features(from_verifier(folder, num_layers=3, layers=LAYERS, block_size=4), None)


def random_fusion(start: Start) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    weights = dict(start.weights)
    for name in ("feature_fusion.weight", "feature_norm.weight"):
        weights[name] = weights[name] + 0.2 * torch.randn(weights[name].shape, generator=generator)
    return weights


def model_of(start: Start, weights: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> BlockModel:
    return BlockModel(start.config, weights, start.embedding, start.output, dtype=dtype, device=torch.device("cpu"))


def features_of(folder: Path, layers: tuple[int, ...]) -> tuple[torch.Tensor, Any]:
    verifier: Any = load_verifier(str(folder), dtype="float32", device="cpu")
    assert isinstance(verifier._model, LlamaForward)
    cache = verifier._model.new_cache()
    _, states = forward_one(verifier._model, cache, TOKENS.numpy().astype(np.int32), 1, layers)
    assert states is not None
    return states, cache


def test_before_training_the_prefix_is_the_verifiers_own_keys_and_values(verifier_folder):
    start = start_of(verifier_folder)
    assert start.config.feature_layers == (1, 2) and start.config.feature_sources == (-1, 0, 1)
    states, theirs = features_of(verifier_folder, (1, 2))
    model = model_of(start, start.weights)
    cache = model.new_cache()
    model.remember(cache, TOKENS[:4], states[:4])
    model.remember(cache, TOKENS[4:], states[4:])
    assert cache.length == 9
    for own, layer in enumerate(LAYERS):
        np.testing.assert_allclose(cache.keys[own, :, :9], theirs.keys[layer, :, :9], atol=1e-4)
        np.testing.assert_allclose(cache.values[own, :, :9], theirs.values[layer, :, :9], atol=1e-4)


def test_layers_start_from_the_nearest_output(verifier_folder):
    start = from_verifier(verifier_folder, num_layers=3, layers=LAYERS, block_size=4)
    config = with_features(start, (0, 3)).config
    assert config.feature_layers == (0, 3) and config.feature_sources == (-1, 0, 1)
    assert with_features(start, (3,)).config.feature_sources == (-1, 0, 0)
    for bad in ((4,), (1, 1), (2, 1), ()):
        with pytest.raises(InvalidConfig, match="feature layers must be different ones of 0 … 3"):
            with_features(start, bad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.qint8])
def test_lower_precision_is_close(verifier_folder, dtype):
    start = start_of(verifier_folder)
    states, _ = features_of(verifier_folder, (1, 2))
    block = torch.tensor([7, MASK_ID, MASK_ID])
    logits = []
    for precision in (torch.float32, dtype):
        model = model_of(start, random_fusion(start), precision)
        cache = model.new_cache()
        model.remember(cache, TOKENS, states.bfloat16())
        logits.append(model.logits(model.forward(cache, block[:0], block)))
    assert np.corrcoef(logits[0].ravel(), logits[1].ravel())[0, 1] > 0.95


@pytest.fixture
def pair(verifier_folder, tmp_path) -> tuple[Any, Any]:
    start = start_of(verifier_folder)
    name = save_start(tmp_path / "drafter", start, random_fusion(start))
    drafter = load_drafter(name, verifier=str(verifier_folder), dtype="float32", device="cpu")
    assert drafter.info.feature_layers == (1, 2) and drafter.info.feature_size == 64
    return drafter, load_verifier(str(verifier_folder), dtype="float32", device="cpu")


async def answer(drafter: Any, verifier: Any, **options: Any) -> list[TokenChunk]:
    request = make_request((3, 1, 4, 1, 5), max_tokens=24, ignore_eos=True, **options)
    config = DecodeConfig(policy=Static(3))
    return [chunk async for chunk in decode(request, config, drafter, verifier, tier="exact")]


class Forgetful(Direct):
    """Loses the session before every third call."""

    num_calls = 0

    def _lose(self, call: Any) -> None:
        self.num_calls += 1
        if self.num_calls % 3 == 0:
            self._engine.release(call.prefix.session_id)

    async def draft(self, call: Any) -> Any:
        self._lose(call)
        return await super().draft(call)

    async def verify(self, call: Any) -> Any:
        self._lose(call)
        return await super().verify(call)


async def test_greedy_answers_are_the_verifiers_own_also_when_replicas_are_lost(verifier_folder, pair):
    model = tiny_llama(num_hidden_layers=4)

    @torch.inference_mode()
    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        return model(input_ids=torch.tensor([prefix])).logits[0, -1].numpy()

    expected = plain_greedy(logits, (3, 1, 4, 1, 5), 24)
    drafter, verifier = pair
    for one, other in ((Direct, Direct), (Forgetful, Direct), (Direct, Forgetful)):
        chunks = await answer(one(drafter), other(verifier))
        assert tokens_of(chunks) == expected
        assert sum(record.num_drafted for chunk in chunks for record in chunk.rounds) > 8
        assert not any(record.degraded for chunk in chunks for record in chunk.rounds)


async def test_sampled_answers_are_the_same_when_the_drafter_is_lost(pair):
    drafter, verifier = pair
    expected = tokens_of(await answer(Direct(drafter), Direct(verifier), temperature=1.0, seed=4))
    assert tokens_of(await answer(Forgetful(drafter), Direct(verifier), temperature=1.0, seed=4)) == expected


@pytest.mark.parametrize("num_steps", [1, 2])
def test_calls_are_idempotent_and_may_state_the_prefix_in_any_pieces(pair, verifier_folder, num_steps):
    drafter, _ = pair
    states = features_of(verifier_folder, (1, 2))[0].half().numpy()
    tokens = TOKENS.numpy().astype(np.int32)

    def draft(cached: int, end: int, session: str, round_index: int) -> Any:
        prefix = PrefixStatement(session, round_index, cached, prefix_crc(tokens[:cached]), tokens[cached:end])
        call = DraftCall(
            prefix, 4, Effort(num_steps), SamplingParams(1.0), 16, 7, features=states[cached : end - 1]
        )  # fmt: skip
        return drafter.draft(call)

    whole = draft(0, 9, "whole", 0)
    draft(0, 4, "pieces", 0)
    draft(3, 5, "pieces", 1)
    for _ in range(2):
        pieces = draft(4, 9, "pieces", 2)
        assert pieces.token_ids.tolist() == whole.token_ids.tolist()
        np.testing.assert_allclose(pieces.proposals.probs, whole.proposals.probs, atol=1e-5)
    with pytest.raises(InvalidRequest, match=r"features must be .*\[8, 64\]"):
        prefix = PrefixStatement("bad", 0, 0, prefix_crc(tokens[:0]), tokens)
        drafter.draft(DraftCall(prefix, 4, Effort(), SamplingParams(1.0), 16, 7, features=states[:5]))


def test_the_config_is_checked(verifier_folder, tmp_path):
    start = start_of(verifier_folder)
    name = save_start(tmp_path / "drafter", start, start.weights)
    path = tmp_path / "drafter" / "config.json"
    good = json.loads(path.read_text())
    for change in ({"feature_layers": [2, 1]}, {"feature_sources": [0, 0]}, {"feature_sources": [0, 1, 2]}):
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(InvalidConfig, match="feature_"):
            load_drafter(name, verifier=str(verifier_folder), device="cpu")
    assert "feature_fusion.weight" in load_file(tmp_path / "drafter" / "drafter.safetensors")
    assert start.config.vocab_size == VOCAB_SIZE
