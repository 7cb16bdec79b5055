from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MambaConfig, MambaForCausalLM, PreTrainedModel

from specdiff_dist.core.rows import SparseRows
from specdiff_dist.errors import (
    InvalidConfig,
    InvalidRequest,
    InvalidRows,
    ModelUnavailable,
    PrefixMismatch,
    StaleRound,
)
from specdiff_dist.types import PrefixStatement, SamplingParams, TargetRows, VerifyCall, prefix_crc
from specdiff_dist.verifiers import load_verifier
from specdiff_dist.verifiers.causal_lm import CausalLMVerifier
from specdiff_dist.verifiers.transformers_forward import TransformersForward
from tests.tiny_models import VOCAB_SIZE, save_verifier, tiny_llama, tiny_sliding

SAMPLED = SamplingParams(1.0)  # narrow: the vocabulary is below MAX_NARROW_SUPPORT


def make_verifier(model: PreTrainedModel, **options: int) -> CausalLMVerifier:
    return CausalLMVerifier(TransformersForward(model), name="tiny", eos_token_ids=(2,), **options)


def make_call(
    tokens: list[int], drafts: list[int], *, cached: int = 0, round_index: int = 0, sampling=SAMPLED, session="s"
) -> VerifyCall:
    """States `tokens` as committed, the first `cached` of them believed cached."""
    committed = np.array(tokens, np.int32)
    prefix = PrefixStatement(session, round_index, cached, prefix_crc(committed[:cached]), committed[cached:])
    return VerifyCall(prefix, np.array(drafts, np.int32), sampling, None, np.full(len(drafts) + 1, 0.5))


def law_of(target: TargetRows) -> np.ndarray:
    law = np.zeros((target.rows.num_rows, VOCAB_SIZE))
    law[target.rows.row_index(), target.rows.token_ids] = target.rows.probs
    return law / target.row_mass[:, None]


@torch.inference_mode()
def recomputed(model: PreTrainedModel, tokens: list[int], num_rows: int) -> np.ndarray:
    """The law at the last `num_rows` positions, without any cache."""
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -num_rows:]
    return torch.softmax(logits.double(), dim=-1).numpy()


MODELS = {"full": tiny_llama, "sliding": lambda: tiny_sliding(window=8)}


@pytest.mark.parametrize("kind", MODELS)
def test_fifty_rounds_of_rollback_equal_recomputation(kind):
    """Accepts all, some and none of the drafts in turn; with the sliding window also across its edge."""
    model = MODELS[kind]()
    verifier = make_verifier(model)
    rng = np.random.default_rng(0)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    cached = 0
    for index in range(50):
        drafts = rng.integers(0, VOCAB_SIZE, 3).tolist()
        target = verifier.verify(make_call(tokens, drafts, cached=cached, round_index=index))
        assert target.cached_len == len(tokens) + 3
        np.testing.assert_allclose(law_of(target), recomputed(model, tokens + drafts, 4), atol=1e-5)
        num_accepted = index % 4
        cached = len(tokens) + num_accepted
        tokens = [*tokens, *drafts[:num_accepted], int(rng.integers(VOCAB_SIZE))]
    assert verifier.num_sessions == 1


@pytest.mark.parametrize("kind", MODELS)
def test_its_own_greedy_continuation_is_accepted_whole_at_consecutive_positions(kind):
    model, reference = MODELS[kind](), MODELS[kind]()
    verifier = make_verifier(model)
    positions: list[list[int]] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: positions.append(kwargs["position_ids"][0].tolist()), with_kwargs=True
    )
    tokens, cached = [5, 6, 7], 0
    greedy = SamplingParams(0.0)
    for index in range(8):
        text = list(tokens)
        for _ in range(4):
            text.append(int(recomputed(reference, text, 1).argmax()))
        positions.clear()
        target = verifier.verify(make_call(tokens, text[-4:], cached=cached, round_index=index, sampling=greedy))
        assert target.rows.token_ids[:4].tolist() == text[-4:]
        assert positions == [list(range(cached, len(text)))]
        cached = len(text)
        tokens = [*text, int(target.rows.token_ids[4])]


def test_a_repeated_call_gives_the_same_rows():
    verifier = make_verifier(tiny_llama())
    call = make_call([1, 2, 3], [4, 5])
    first = verifier.verify(call)
    verifier.verify(make_call([1, 2, 3, 4, 9], [8], cached=4, round_index=1))
    with pytest.raises(StaleRound):
        verifier.verify(call)
    later = make_call([1, 2, 3], [4, 5], round_index=1)
    np.testing.assert_array_equal(law_of(verifier.verify(later)), law_of(first))


def test_less_or_other_tokens_than_stated_are_reported_and_resent():
    model = tiny_llama()
    verifier = make_verifier(model)
    with pytest.raises(PrefixMismatch) as nothing:
        verifier.verify(make_call([1, 2, 3], [4], cached=2))
    assert nothing.value.cached_len == 0
    verifier.verify(make_call([1, 2], [4]))
    with pytest.raises(PrefixMismatch) as less:
        verifier.verify(make_call([1, 2, 4, 5, 6], [7], cached=4, round_index=1))
    assert less.value.cached_len == 3
    with pytest.raises(PrefixMismatch) as other:
        verifier.verify(make_call([1, 9, 4, 5], [7], cached=3, round_index=1))
    assert other.value.cached_len == 0
    target = verifier.verify(make_call([1, 9, 4, 5], [7], cached=0, round_index=1))
    np.testing.assert_allclose(law_of(target), recomputed(model, [1, 9, 4, 5, 7], 2), atol=1e-5)


@pytest.mark.parametrize("num_prompt", [1, 4, 5, 8, 30])
@pytest.mark.parametrize("num_draft", [0, 2, 6])
def test_prompts_in_chunks_equal_prompts_in_one_piece(num_prompt, num_draft):
    model = tiny_llama()
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, num_prompt + num_draft).tolist()
    call = make_call(tokens[:num_prompt], tokens[num_prompt:])
    target = make_verifier(model, prefill_chunk=4).verify(call)
    np.testing.assert_allclose(law_of(target), recomputed(model, tokens, num_draft + 1), atol=1e-5)
    assert target.cost.num_forwards >= len(tokens) / max(4, num_draft + 1)
    assert make_verifier(model).verify(call).cost.num_forwards == 1
    assert target.cost.forward_s > 0.0


def test_sessions_do_not_touch_each_other_and_the_oldest_goes_first():
    model = tiny_llama()
    verifier = make_verifier(model, max_sessions=2)
    texts = {"a": [1, 2, 3], "b": [40, 50], "c": [7]}
    for session, tokens in list(texts.items())[:2]:
        verifier.verify(make_call(tokens, [9, 9], session=session))
    target = verifier.verify(make_call([*texts["a"], 4], [5], cached=3, round_index=1, session="a"))
    np.testing.assert_allclose(law_of(target), recomputed(model, [1, 2, 3, 4, 5], 2), atol=1e-5)
    verifier.verify(make_call(texts["c"], [], session="c"))
    assert verifier.num_sessions == 2
    with pytest.raises(PrefixMismatch):  # b was used least recently
        verifier.verify(make_call([40, 50, 60], [], cached=2, round_index=1, session="b"))
    verifier.release("a")
    verifier.release("b")
    verifier.release("unknown")
    assert verifier.num_sessions == 1  # c


def test_broken_logits_end_in_an_error_and_no_session():
    model = tiny_llama()
    verifier = make_verifier(model)
    verifier.verify(make_call([1, 2], [3]))
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(InvalidRows):
        verifier.verify(make_call([1, 2, 3], [4], cached=2, round_index=1))
    assert verifier.num_sessions == 0


def test_a_forward_that_fails_drops_the_session():
    model = tiny_llama()
    verifier = make_verifier(model)
    verifier.verify(make_call([1, 2], [3]))
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError("full")))
    with pytest.raises(MemoryError):
        verifier.verify(make_call([1, 2, 3], [4], cached=2, round_index=1))
    handle.remove()
    assert verifier.num_sessions == 0
    with pytest.raises(PrefixMismatch):
        verifier.verify(make_call([1, 2, 3], [4], cached=2, round_index=1))
    target = verifier.verify(make_call([1, 2, 3], [4], round_index=1))
    np.testing.assert_allclose(law_of(target), recomputed(model, [1, 2, 3, 4], 2), atol=1e-5)


def test_limits_are_refused_and_leave_the_session_alone():
    model = tiny_llama()
    verifier = make_verifier(model, max_model_len=8)
    assert verifier.info.max_model_len == 8
    verifier.verify(make_call([1, 2, 3, 4], [5, 6, 7, 8]))
    for call in (
        make_call([1, 2, 3, 4], [5, 6, 7, 8, 9]),
        make_call([1, 2, VOCAB_SIZE], []),
        make_call([1, 2], [-1]),
        make_call([1, 2], [], cached=2),
    ):
        with pytest.raises(InvalidRequest):
            verifier.verify(call)
    target = verifier.verify(make_call([1, 2, 3, 4, 5], [6], cached=4))
    np.testing.assert_allclose(law_of(target), recomputed(model, [1, 2, 3, 4, 5, 6], 2), atol=1e-5)
    with pytest.raises(InvalidConfig, match="max_model_len"):
        make_verifier(model, max_model_len=257)


def test_ids_that_pad_the_output_matrix_have_no_probability(tmp_path):
    save_verifier(tmp_path, tiny_llama(), num_words=90)
    verifier = load_verifier(str(tmp_path), dtype="float32", device="cpu")
    assert verifier.info.vocab_size == 90
    assert verifier.info.name == tmp_path.name
    target = verifier.verify(make_call([1, 2, 3], [4]))
    assert target.rows.token_ids.max() < 90
    np.testing.assert_allclose(target.row_mass, 1.0, atol=1e-6)
    with pytest.raises(InvalidRequest):
        verifier.verify(make_call([1, 95], []))


def test_dtype_and_context_as_asked(tmp_path):
    save_verifier(tmp_path, tiny_llama())
    assert load_verifier(str(tmp_path)).info.dtype == "bfloat16"
    verifier = load_verifier(str(tmp_path), dtype="float32", max_model_len=12)
    assert (verifier.info.dtype, verifier.info.max_model_len) == ("float32", 12)
    with pytest.raises(InvalidConfig, match="dtype"):
        load_verifier(str(tmp_path), dtype="int8")
    with pytest.raises(InvalidConfig, match="device"):
        load_verifier(str(tmp_path), device="abacus")
    with pytest.raises(InvalidConfig, match="no device"):
        load_verifier(str(tmp_path), device="cuda:99")


def test_a_broken_folder_is_model_unavailable(tmp_path):
    save_verifier(tmp_path, tiny_llama())
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelUnavailable):
        TransformersForward.load(tmp_path)


def test_models_whose_state_cannot_be_cut_back_are_refused():
    model = MambaForCausalLM(MambaConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, state_size=4))
    with pytest.raises(InvalidConfig, match="verifier"):
        TransformersForward(model)


def test_code_in_a_model_folder_never_runs(tmp_path):
    save_verifier(tmp_path, tiny_llama())
    marker = tmp_path / "marker"
    (tmp_path / "code.py").write_text(f"open({str(marker)!r}, 'w')\nclass Model: ...\n")
    config = (tmp_path / "config.json").read_text()
    auto_map = '"auto_map": {"AutoConfig": "code.Model", "AutoModelForCausalLM": "code.Model"},'
    (tmp_path / "config.json").write_text(config.replace("{", "{" + auto_map, 1))
    load_verifier(str(tmp_path))
    assert not marker.exists()


def test_wide_replies_come_from_the_same_forward():
    """Vocabulary above MAX_NARROW_SUPPORT: the row on the proposal's support is the recomputed one."""
    model = tiny_llama(vocab_size=400)
    proposals = SparseRows.from_rows([(np.array([3, 300]), np.array([0.5, 0.5])), (np.array([7]), np.array([1.0]))])
    call = make_call([1, 2, 3], [300, 7])
    call = VerifyCall(call.prefix, call.draft_token_ids, SAMPLED, proposals, np.array([0.1, 0.5, 0.9]))
    target = make_verifier(model).verify(call)
    assert target.is_wide
    expected = recomputed(model, [1, 2, 3, 300, 7], 3)
    np.testing.assert_allclose(target.rows.probs, [expected[0, 3], expected[0, 300], expected[1, 7]], atol=1e-5)
    assert target.plain_token_ids is not None
    steps = np.cumsum(expected[2])
    assert steps[target.plain_token_ids[2] - 1] <= 0.9 + 1e-5
    assert steps[target.plain_token_ids[2]] >= 0.9 - 1e-5


def test_weights_that_lack_a_tensor_are_refused_not_made_up(tmp_path):
    folder = save_verifier(tmp_path, tiny_sliding(8))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({key: tensor for key, tensor in tensors.items() if "layers.1.mlp.up_proj" not in key}, file)
    with pytest.raises(ModelUnavailable, match=r"lack model\.layers\.1\.mlp\.up_proj"):
        TransformersForward.load(folder)
