from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from specdiff_dist.config import Effort
from specdiff_dist.core.rows import entries_of
from specdiff_dist.drafters import EMBEDDED_DRAFTERS, load_drafter
from specdiff_dist.drafters import block_diffusion as module
from specdiff_dist.drafters.block_diffusion import BlockDiffusionDrafter, predict_rows
from specdiff_dist.drafters.block_model import MASK_ID
from specdiff_dist.errors import (
    InvalidConfig,
    InvalidRequest,
    InvalidRows,
    ModelUnavailable,
    PrefixMismatch,
    StaleRound,
)
from specdiff_dist.types import DraftBlock, DraftCall, PrefixStatement, SamplingParams, prefix_crc
from tests.tiny_models import VOCAB_SIZE, block_model, save_drafter, save_verifier, tiny_llama

SAMPLED, GREEDY = SamplingParams(1.0), SamplingParams(0.0)


def make_drafter(**changes: int) -> BlockDiffusionDrafter:
    return BlockDiffusionDrafter(block_model(tiny_llama(), dtype=torch.float32, **changes), name="tiny")


def draft(
    drafter: BlockDiffusionDrafter, tokens: list[int], *, cached=0, round_index=0, wanted=4, effort=None, sampling=SAMPLED,
    draft_top_k=10, seed=0, session="s",
) -> DraftBlock:  # fmt: skip
    committed = np.array(tokens, np.int32)
    prefix = PrefixStatement(session, round_index, cached, prefix_crc(committed[:cached]), committed[cached:])
    return drafter.draft(DraftCall(prefix, wanted, effort or Effort(), sampling, draft_top_k, seed))


def assert_same(block: DraftBlock, other: DraftBlock) -> None:
    assert block.token_ids.tolist() == other.token_ids.tolist()
    assert block.proposals.token_ids.tolist() == other.proposals.token_ids.tolist()
    np.testing.assert_allclose(block.proposals.probs, other.proposals.probs, atol=1e-5)
    np.testing.assert_allclose(block.max_probs, other.max_probs, atol=1e-5)


@pytest.mark.parametrize("effort", [Effort(1), Effort(2), Effort(3, "entropy"), Effort(4, "token_prob", "one_hot")])
def test_fifty_rounds_on_a_cached_prefix_equal_fresh_drafts(effort):
    """K14 row 71: after every round the cache holds the committed tokens but the pending one."""
    drafter, fresh = make_drafter(), make_drafter()
    rng = np.random.default_rng(0)
    tokens, cached = [1, 2, 3], 0
    for index in range(50):
        block = draft(drafter, tokens, cached=cached, round_index=index, effort=effort, seed=index)
        again = draft(fresh, tokens, effort=effort, seed=index, session=str(index))
        assert_same(block, again)
        assert block.cached_len == len(tokens) - 1
        assert block.cost.num_forwards == min(effort.num_denoising_steps, 4)
        cached = block.cached_len
        tokens = [*tokens, *block.token_ids[: index % 5].tolist(), int(rng.integers(VOCAB_SIZE))]


def test_proposals_are_the_models_truncated_rows():
    model = block_model(tiny_llama())
    block = draft(BlockDiffusionDrafter(model, name="tiny"), [5, 6, 7], sampling=SamplingParams(0.7), draft_top_k=5)
    hidden = model.forward(model.new_cache(), torch.tensor([5, 6]), torch.tensor([7, MASK_ID, MASK_ID, MASK_ID]))
    logits = model.logits(hidden).double()
    top = torch.topk(logits, 5, dim=-1)
    for index in range(4):
        token_ids, probs = block.proposals.row(index)
        assert sorted(top.indices[index].tolist()) == token_ids.tolist()
        expected = torch.softmax(top.values[index] / 0.7, dim=-1)[torch.argsort(top.indices[index])]
        np.testing.assert_allclose(probs, expected, atol=1e-6)
    np.testing.assert_allclose(block.max_probs, torch.softmax(logits, dim=-1).amax(dim=-1), atol=1e-6)
    at = entries_of(block.proposals, block.token_ids)
    assert at is not None  # with a probability above 0
    drawn = block.proposals.normalised()[at]
    np.testing.assert_allclose(block.confidences, drawn, rtol=1e-6)


def test_tokens_are_drawn_from_the_proposals():
    drafter = make_drafter()
    blocks = [draft(drafter, [5, 6, 7], cached=2 * (seed > 0), seed=seed, wanted=2) for seed in range(2000)]
    for position in range(2):
        token_ids, probs = blocks[0].proposals.row(position)
        counts = np.bincount([b.token_ids[position] for b in blocks], minlength=VOCAB_SIZE)[token_ids]
        assert counts.sum() == 2000
        expected = 2000 * probs.astype(np.float64)
        keep = expected > 5
        assert np.sum((counts - expected)[keep] ** 2 / expected[keep]) < 40  # chi-square, ≤ 9 degrees of freedom


def test_greedy_blocks_are_the_argmax_and_one_hot():
    model = block_model(tiny_llama())
    block = draft(BlockDiffusionDrafter(model, name="tiny"), [5, 6, 7], sampling=GREEDY)
    hidden = model.forward(model.new_cache(), torch.tensor([5, 6]), torch.tensor([7, MASK_ID, MASK_ID, MASK_ID]))
    logits = model.logits(hidden)
    assert block.token_ids.tolist() == logits.argmax(dim=-1).tolist()
    assert block.proposals.probs.tolist() == [1.0] * 4
    np.testing.assert_allclose(block.confidences, torch.softmax(logits, dim=-1).amax(dim=-1), atol=1e-6)


def test_later_steps_see_the_tokens_revealed_before():
    drafter = make_drafter()
    one, four = draft(drafter, [5, 6, 7], sampling=GREEDY), draft(drafter, [5, 6, 7], sampling=GREEDY, effort=Effort(4))
    assert one.token_ids[0] == four.token_ids[0]
    model = block_model(tiny_llama())
    hidden = model.forward(
        model.new_cache(), torch.tensor([5, 6]), torch.tensor([7, int(one.token_ids[0]), MASK_ID, MASK_ID])
    )
    assert four.token_ids[1] == model.logits(hidden[1:2]).argmax()


def test_a_repeated_call_gives_the_same_block():
    drafter = make_drafter()
    draft(drafter, [1, 2, 3, 4])
    first = draft(drafter, [1, 2, 3, 4, 5, 6], cached=3, round_index=1)
    assert_same(first, draft(drafter, [1, 2, 3, 4, 5, 6], cached=3, round_index=1))


def test_long_prompts_go_in_chunks(monkeypatch):
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 50).tolist()
    whole = draft(make_drafter(), tokens)
    monkeypatch.setattr(module, "PREFILL_CHUNK", 7)
    chunked = draft(make_drafter(), tokens)
    assert_same(whole, chunked)
    assert (whole.cost.num_forwards, chunked.cost.num_forwards) == (1, 7)


def test_blocks_shrink_at_the_limits():
    drafter = make_drafter(max_position_embeddings=12, max_block_size=6)
    assert draft(drafter, [1, 2], wanted=9).num_tokens == 6
    assert draft(drafter, [1] * 10, wanted=6, session="b").num_tokens == 3
    assert draft(drafter, [1] * 12, wanted=6, session="c").num_tokens == 1
    assert draft(drafter, [1] * 13, wanted=6, session="d").num_tokens == 0


def test_the_prefix_protocol_is_kept():
    drafter = make_drafter()
    with pytest.raises(PrefixMismatch):
        draft(drafter, [1, 2, 3], cached=2)
    draft(drafter, [1, 2, 3], round_index=3)
    with pytest.raises(StaleRound):
        draft(drafter, [1, 2, 3], round_index=2)
    with pytest.raises(PrefixMismatch) as mismatch:
        draft(drafter, [1, 9, 3], cached=2, round_index=4)
    assert mismatch.value.cached_len == 0
    for wrong, cached in (([1, 2], 2), ([1, VOCAB_SIZE], 0), ([1, -1], 0)):
        with pytest.raises(InvalidRequest):
            draft(drafter, wrong, cached=cached, round_index=5)
    drafter.release("s")
    drafter.release("s")
    assert drafter.num_sessions == 0


def test_broken_weights_end_in_an_error_and_no_session():
    model = block_model(tiny_llama())
    drafter = BlockDiffusionDrafter(model, name="tiny")
    draft(drafter, [1, 2, 3])
    model._layers._final_norm.fill_(torch.nan)
    with pytest.raises(InvalidRows):
        draft(drafter, [1, 2, 3, 4], cached=2, round_index=1)
    assert drafter.num_sessions == 0


def test_padding_ids_are_never_proposed():
    drafter = BlockDiffusionDrafter(block_model(tiny_llama()), name="tiny", vocab_size=60)
    assert drafter.info.vocab_size == 60
    block = draft(drafter, [5, 6, 7], draft_top_k=VOCAB_SIZE)
    assert block.proposals.token_ids.max() < 60


def test_a_verifier_padded_further_than_the_drafter_is_the_same_verifier(tmp_path):
    """The padding is neither read nor proposed; a drafter that lacks real tokens is refused."""
    padded = tiny_llama(vocab_size=VOCAB_SIZE + 4)
    folder = str(save_drafter(tmp_path / "drafter", padded))  # its config.json says VOCAB_SIZE
    verifier = save_verifier(tmp_path / "verifier", padded)
    drafter = load_drafter(folder, verifier=str(verifier), dtype="float32", device="cpu")
    assert isinstance(drafter, BlockDiffusionDrafter) and drafter.info.vocab_size == VOCAB_SIZE
    block = draft(drafter, [5, 6, 7], draft_top_k=VOCAB_SIZE + 4)
    assert block.num_tokens > 0 and block.proposals.token_ids.max() < VOCAB_SIZE
    larger = save_verifier(tmp_path / "larger", padded, num_words=VOCAB_SIZE + 1)
    with pytest.raises(InvalidConfig, match="was trained for a vocabulary of 100"):
        load_drafter(folder, verifier=str(larger), dtype="float32", device="cpu")


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_draft_vocab_proposes_its_own_ids_with_their_share(tmp_path, sampling):
    llama = tiny_llama()
    chosen = torch.tensor([2, 9, 33, 58, 59, 71, 98], dtype=torch.int32)
    folder = save_drafter(tmp_path / "drafter", llama, draft_vocab=chosen)
    verifier = save_verifier(tmp_path / "verifier", llama, num_words=95)
    drafter = load_drafter(str(folder), verifier=str(verifier), dtype="float32", device="cpu")
    assert isinstance(drafter, BlockDiffusionDrafter)
    block = draft(drafter, [5, 6, 7], sampling=sampling)
    model = block_model(llama)
    hidden = model.forward(model.new_cache(), torch.tensor([5, 6]), torch.tensor([7, MASK_ID, MASK_ID, MASK_ID]))
    real = chosen[:-1].long()  # 98 is no word of this verifier
    probs = torch.softmax(model.logits(hidden)[:, real], dim=-1)
    np.testing.assert_allclose(block.max_probs, probs.amax(dim=-1), atol=1e-6)
    for index in range(4):
        token_ids, row = block.proposals.row(index)
        if sampling.is_greedy:
            assert token_ids.tolist() == [real[probs[index].argmax()]]
        else:
            assert token_ids.tolist() == real.tolist()
            np.testing.assert_allclose(row, probs[index], atol=1e-6)
    with pytest.raises(InvalidConfig, match="draft_vocab"):
        BlockDiffusionDrafter(drafter._model, name="tiny", vocab_size=2)


def test_entropy_and_max_prob_do_not_depend_on_the_sampling_parameters():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    plain = predict_rows(logits, SAMPLED, 50)
    probs = torch.softmax(logits.double(), dim=-1)
    np.testing.assert_allclose(plain.max_probs, probs.amax(dim=-1), rtol=1e-5)
    np.testing.assert_allclose(plain.entropies, -(probs * probs.log()).sum(dim=-1), rtol=1e-5)
    for sampling in (GREEDY, SamplingParams(0.3, 4, 0.9)):
        other = predict_rows(logits, sampling, 50)
        np.testing.assert_array_equal(other.max_probs, plain.max_probs)
        np.testing.assert_array_equal(other.entropies, plain.entropies)


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "int8"])
def test_a_folder_loads_in_every_dtype(tmp_path, dtype):
    llama = tiny_llama()
    folder, verifier = (
        save_drafter(tmp_path / "drafter", llama),
        save_verifier(tmp_path / "verifier", llama, num_words=95),
    )
    drafter = load_drafter(str(folder), verifier=str(verifier), dtype=dtype, device="cpu")
    assert drafter.info.vocab_size == 95
    block = draft(drafter, [5, 6, 7], sampling=GREEDY)  # pyright: ignore[reportArgumentType]
    assert block.num_tokens == 4
    if dtype == "float32":
        assert block.token_ids.tolist() == draft(make_drafter(), [5, 6, 7], sampling=GREEDY).token_ids.tolist()


def test_a_verifier_with_its_own_output_matrix(tmp_path):
    """Untied: proposals come from lm_head, not from the embedding."""
    llama = tiny_llama(tie_word_embeddings=False)
    folder, verifier = save_drafter(tmp_path / "drafter", llama), save_verifier(tmp_path / "verifier", llama)
    drafter = load_drafter(str(folder), verifier=str(verifier), dtype="float32", device="cpu")
    model = block_model(llama)
    hidden = model.forward(model.new_cache(), torch.tensor([5, 6]), torch.tensor([7, MASK_ID]))
    expected = (hidden @ llama.lm_head.weight.detach().T).argmax(dim=-1)
    block = draft(drafter, [5, 6, 7], sampling=GREEDY, wanted=2)  # pyright: ignore[reportArgumentType]
    assert block.token_ids.tolist() == expected.tolist()


def test_another_verifier_is_refused_by_name(tmp_path):
    verifier = save_verifier(tmp_path / "other", tiny_llama())
    with pytest.raises(InvalidConfig, match=r"vocabulary of 49152.*'other' has 100"):
        load_drafter("diffusion", verifier=str(verifier))
    folder = save_drafter(tmp_path / "drafter", tiny_llama(hidden_size=64), hidden_size=64)
    with pytest.raises(InvalidConfig, match=r"hidden size of 64.*has 32"):
        load_drafter(str(folder), verifier=str(verifier))


def test_unknown_names_and_values_are_refused(tmp_path):
    verifier = str(save_verifier(tmp_path / "verifier", tiny_llama()))
    with pytest.raises(InvalidConfig, match="prompt-lookup"):
        load_drafter("eagle", verifier=verifier)
    folder = save_drafter(tmp_path / "drafter", tiny_llama())
    with pytest.raises(InvalidConfig, match="dtype"):
        load_drafter(str(folder), verifier=verifier, dtype="float8")
    (folder / "drafter.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelUnavailable):
        load_drafter(str(folder), verifier=verifier)
    (folder / "drafter.safetensors").unlink()
    with pytest.raises(ModelUnavailable, match="one safetensors file"):
        load_drafter(str(folder), verifier=verifier)


def test_the_weights_are_part_of_the_package():
    folder = EMBEDDED_DRAFTERS["diffusion"]
    assert {"config.json", "drafter.safetensors", "README.md"} <= {path.name for path in folder.iterdir()}


def test_its_calibration_is_read_and_checked(tmp_path):
    verifier = str(save_verifier(tmp_path / "verifier", tiny_llama()))
    folder = save_drafter(tmp_path / "drafter", tiny_llama())

    def load():
        return load_drafter(str(folder), verifier=verifier, device="cpu", dtype="float32").info.calibration

    assert load() == ()
    config = json.loads((folder / "config.json").read_text())
    for table, is_right in (([[0.1] * 16], True), ([[0.1] * 15], False), ("no", False), ([["x"] * 16], False)):
        (folder / "config.json").write_text(json.dumps({**config, "calibration": {"table": table}}))
        if is_right:
            assert load() == ((0.1,) * 16,)
        else:
            with pytest.raises(InvalidConfig, match="calibration"):
                load()
