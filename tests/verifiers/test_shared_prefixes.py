from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from specdiff_dist.types import PrefixStatement, SamplingParams, VerifyCall, prefix_crc
from specdiff_dist.verifiers.causal_lm import CausalLMVerifier
from specdiff_dist.verifiers.folder import read_config
from specdiff_dist.verifiers.llama_forward import LlamaForward, plain_llama
from specdiff_dist.verifiers.shared_prefixes import BLOCK, SharedPrefixes, block_keys
from specdiff_dist.verifiers.transformers_forward import TransformersForward
from tests.tiny_models import VOCAB_SIZE, save_verifier, tiny_llama

LAYERS = (0, 1)
RNG = np.random.default_rng(3)
SYSTEM = RNG.integers(0, VOCAB_SIZE, 2 * BLOCK + 5).astype(np.int32)  # what many prompts begin with


def tokens(num_own: int) -> np.ndarray:
    return np.concatenate([SYSTEM, RNG.integers(0, VOCAB_SIZE, num_own).astype(np.int32)])


def call(
    token_ids: np.ndarray, session: str, *, drafts: int = 2, cached: int = 0, round_index: int = 0, **options: Any
):
    prefix = PrefixStatement(session, round_index, cached, prefix_crc(token_ids[:cached]), token_ids[cached:])
    draft_ids = np.arange(5, 5 + drafts, dtype=np.int32)
    return VerifyCall(prefix, draft_ids, SamplingParams(1.0), None, np.full(drafts + 1, 0.5), **options)


class Counted:
    """A model that counts the tokens it reads."""

    def __init__(self, model: Any) -> None:
        self._model, self.num_tokens = model, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward_parts(self, parts: Any) -> Any:
        self.num_tokens += sum(part.num_tokens for part in parts)
        return self._model.forward_parts(parts)


@pytest.fixture(params=["own", "transformers"])
def model(request, tmp_path) -> Counted:
    folder = save_verifier(tmp_path, tiny_llama())
    if request.param == "transformers":
        return Counted(TransformersForward(tiny_llama()))
    shape = plain_llama(read_config(folder))
    assert shape is not None
    return Counted(LlamaForward.load(folder, shape, dtype="float32", device="cpu"))


def verifier(model: Counted, **options: Any) -> CausalLMVerifier[Any]:
    return CausalLMVerifier(cast(Any, model), name="tiny", **options)


def fresh(model: Counted, one: VerifyCall) -> Any:
    return verifier(model, max_shared_tokens=0).verify(one)


def same(a: Any, b: Any) -> None:
    np.testing.assert_array_equal(a.rows.token_ids, b.rows.token_ids)
    np.testing.assert_allclose(a.rows.probs, b.rows.probs, atol=1e-5)
    assert a.cached_len == b.cached_len
    assert (a.features is None) == (b.features is None)
    if a.features is not None:
        np.testing.assert_allclose(a.features.astype(float), b.features.astype(float), atol=5e-3, rtol=2e-3)


@pytest.mark.parametrize("layers", [(), LAYERS], ids=["plain", "features"])
@pytest.mark.parametrize("has_ended", [False, True])
def test_what_begins_alike_is_read_once(model, layers, has_ended):
    engine = verifier(model)
    first, second = tokens(9), tokens(20)
    engine.verify(call(first, "a", feature_layers=layers))
    if has_ended:
        engine.release("a")
    model.num_tokens = 0
    found = engine.verify(call(second, "b", feature_layers=layers))
    assert model.num_tokens == len(second) + 2 - 2 * BLOCK
    same(found, fresh(model, call(second, "b", feature_layers=layers)))
    # and it goes on as if it had read everything itself
    longer = np.append(second, [7, 8]).astype(np.int32)
    more = call(longer, "b", cached=len(second), round_index=1, feature_layers=layers, feature_start=len(second))
    same(engine.verify(more), fresh_round(model, second, more, layers))


def fresh_round(model: Counted, token_ids: np.ndarray, more: VerifyCall, layers: tuple[int, ...]) -> Any:
    engine = verifier(model, max_shared_tokens=0)
    engine.verify(call(token_ids, "b", feature_layers=layers))
    return engine.verify(more)


def test_the_same_prompt_again_still_reads_its_anchor(model):
    engine, prompt = verifier(model), SYSTEM[: 2 * BLOCK]
    engine.verify(call(prompt, "a"))
    model.num_tokens = 0
    found = engine.verify(call(prompt, "b"))
    assert model.num_tokens == BLOCK + 2  # the last block holds the anchor
    same(found, fresh(model, call(prompt, "b")))


def test_features_are_not_made_up(model):
    engine = verifier(model)
    engine.verify(call(tokens(3), "a"))  # no features were asked for
    prompt = tokens(4)
    model.num_tokens = 0
    found = engine.verify(call(prompt, "b", feature_layers=LAYERS))
    assert model.num_tokens == len(prompt) + 2
    same(found, fresh(model, call(prompt, "b", feature_layers=LAYERS)))
    engine.verify(call(tokens(4), "c", feature_layers=(0,)))  # other layers: read anew, too
    assert model.num_tokens > 2 * len(prompt)


def test_a_session_rebuilt_with_other_tokens_lends_nothing_wrong(model):
    engine = verifier(model)
    engine.verify(call(tokens(5), "a"))
    other = RNG.integers(0, VOCAB_SIZE, 90).astype(np.int32)
    engine.verify(call(other, "a", round_index=1))  # the same session, everything stated anew
    prompt = tokens(6)
    same(engine.verify(call(prompt, "b")), fresh(model, call(prompt, "b")))


def test_a_session_cut_back_into_its_prompt_lends_nothing_wrong(model):
    engine = verifier(model)
    first = tokens(5)
    engine.verify(call(first, "a"))
    other = np.concatenate([first[:40], RNG.integers(0, VOCAB_SIZE, 40).astype(np.int32)])
    engine.verify(call(other, "a", cached=40, round_index=1))  # the same beginning, then something else
    prompt = tokens(6)
    same(engine.verify(call(prompt, "b")), fresh(model, call(prompt, "b")))


def test_live_sessions_do_not_see_what_their_neighbours_add(model):
    engine = verifier(model)
    first, second = tokens(9), tokens(20)
    engine.verify(call(first, "a"))
    engine.verify(call(second, "b"))
    more = call(np.append(first, 9).astype(np.int32), "a", cached=len(first), round_index=1)
    found = engine.verify(more)
    alone = verifier(model, max_shared_tokens=0)
    alone.verify(call(first, "a"))
    same(found, alone.verify(more))


def test_memory_is_bounded_and_evicted_sessions_leave_nothing(model):
    engine = verifier(model, max_sessions=2, max_shared_tokens=4 * BLOCK)
    for index in range(20):
        prompt = RNG.integers(0, VOCAB_SIZE, 2 * BLOCK + index).astype(np.int32)
        engine.verify(call(prompt, f"s{index}"))
        if index % 2:
            engine.release(f"s{index}")
    assert engine._prefixes.num_tokens <= 4 * BLOCK
    assert len(engine._prefixes._live) <= 2
    assert len(engine._prefixes._by_key) <= 4 + 2 * 2


def test_copies_are_counted_once():
    prefixes: SharedPrefixes[list[int]] = SharedPrefixes(lambda cache, length: cache[:length], max_tokens=10 * BLOCK)
    for session in ("a", "b", "c"):
        prefixes.add(session, SYSTEM, SYSTEM.tolist(), (), None)
    for session in ("a", "b", "c"):
        prefixes.end(session)
    assert prefixes.num_tokens == 2 * BLOCK
    found = prefixes.find(SYSTEM, ())
    assert found is not None and found[1] == 2 * BLOCK and len(found[0].cache) == 2 * BLOCK


def test_keys_depend_on_everything_before():
    changed = SYSTEM.copy()
    changed[0] += 1
    assert len(block_keys(SYSTEM)) == 2
    assert not set(block_keys(SYSTEM)) & set(block_keys(changed))
    assert block_keys(SYSTEM[:BLOCK]) == block_keys(SYSTEM)[:1]
    assert block_keys(SYSTEM[: BLOCK - 1]) == ()


def test_zero_tokens_turn_sharing_off():
    prefixes: SharedPrefixes[list[int]] = SharedPrefixes(lambda cache, length: cache[:length], max_tokens=0)
    prefixes.add("a", SYSTEM, SYSTEM.tolist(), (), None)
    assert prefixes.find(SYSTEM, ()) is None
    prefixes.end("a")
    assert prefixes.find(SYSTEM, ()) is None and prefixes.num_tokens == 0
