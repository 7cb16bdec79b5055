from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from specdiff_dist.drafters.block_model import MASK_ID, BlockModel, BlockModelConfig
from specdiff_dist.drafters.linear import int8_linear
from specdiff_dist.errors import InvalidConfig, ModelUnavailable
from tests.tiny_models import VOCAB_SIZE, block_config, block_model, block_weights, save_drafter, tiny_llama


def ids(*tokens: int) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64)


@torch.inference_mode()
def reference(tokens: list[int], block: list[int]) -> Tensor:
    """The block's hidden states by transformers' Llama with the same layers and an explicit mask."""
    llama = tiny_llama()
    mask_embedding = block_weights(llama)["mask_embedding"]
    rows = [
        mask_embedding if token == MASK_ID else llama.model.embed_tokens.weight[token] for token in [*tokens, *block]
    ]
    size, start = len(rows), len(tokens)
    allowed = torch.tril(torch.ones(size, size, dtype=torch.bool))
    allowed[start:, start:] = True
    output = llama.model(inputs_embeds=torch.stack(rows)[None], attention_mask=allowed[None, None], use_cache=False)
    return output.last_hidden_state[0, start:]


BLOCK = [9, MASK_ID, 17, MASK_ID]


@pytest.mark.parametrize("tokens", [[], [3], [3, 4, 5, 6, 7, 8]])
def test_a_block_sees_the_whole_prefix_and_itself_and_the_prefix_is_causal(tokens):
    model = block_model(tiny_llama())
    hidden = model.forward(model.new_cache(), ids(*tokens), ids(*BLOCK))
    np.testing.assert_allclose(hidden, reference(tokens, BLOCK), atol=1e-5)


def test_a_cached_prefix_equals_a_fresh_one_and_blocks_leave_no_trace():
    model = block_model(tiny_llama())
    cache = model.new_cache()
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 150).tolist()  # past the first growth of the cache
    done = 0
    for size in (1, 0, 5, 64, 2, 0, 78):
        new = tokens[done : done + size]
        hidden = model.forward(cache, ids(*new), ids(*BLOCK))
        done += size
        assert cache.length == done
        np.testing.assert_allclose(hidden, reference(tokens[:done], BLOCK), atol=2e-5)
    cache.crop(40)
    hidden = model.forward(cache, ids(1, 2), ids(*BLOCK))
    np.testing.assert_allclose(hidden, reference([*tokens[:40], 1, 2], BLOCK), atol=2e-5)


def test_a_prefill_without_a_block_is_causal():
    model = block_model(tiny_llama())
    cache = model.new_cache()
    assert model.forward(cache, ids(1, 2, 3), ids()).shape == (0, 32)
    hidden = model.forward(cache, ids(), ids(*BLOCK))
    np.testing.assert_allclose(hidden, reference([1, 2, 3], BLOCK), atol=1e-5)


def test_positions_beyond_the_first_rotary_table():
    model = block_model(tiny_llama(), max_position_embeddings=1000)
    tokens = np.random.default_rng(1).integers(0, VOCAB_SIZE, 300).tolist()
    hidden = model.forward(model.new_cache(), ids(*tokens), ids(*BLOCK))
    np.testing.assert_allclose(hidden, reference(tokens, BLOCK), atol=5e-5)


def test_logits_are_the_tied_embedding_times_the_hidden_state():
    llama = tiny_llama()
    hidden = torch.randn(2, 32)
    expected = hidden @ llama.model.embed_tokens.weight.detach().T
    np.testing.assert_allclose(block_model(llama).logits(hidden), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.qint8])
def test_lower_precision_is_close(dtype):
    exact, low = block_model(tiny_llama()), block_model(tiny_llama(), dtype=dtype)
    a = exact.logits(exact.forward(exact.new_cache(), ids(1, 2, 3), ids(*BLOCK)))
    b = low.logits(low.forward(low.new_cache(), ids(1, 2, 3), ids(*BLOCK)))
    assert b.dtype == torch.float32
    assert (a - b).abs().max() < 0.1 * a.abs().max()


def test_int8_matrices_are_within_their_rounding():
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(40, 64, generator=generator), torch.randn(5, 64, generator=generator)
    weight[3] *= 100.0  # a scale per output row: a large one does not spoil the others
    error = (int8_linear(weight)(x) - x @ weight.T).abs() / weight.norm(dim=1) / x.norm(dim=1, keepdim=True)
    assert error.max() < 0.01


def test_weights_must_match_the_config():
    llama = tiny_llama()
    weights, table = block_weights(llama), llama.model.embed_tokens.weight.detach()

    def build(config: BlockModelConfig) -> BlockModel:
        return BlockModel(config, weights, table, table, dtype=torch.float32, device=torch.device("cpu"))

    with pytest.raises(ModelUnavailable, match=r"layers\.2.* missing"):
        build(block_config(num_hidden_layers=3))
    with pytest.raises(ModelUnavailable, match=r"of shape \(48, 32\)"):
        build(block_config(intermediate_size=40))
    del weights["mask_embedding"]
    with pytest.raises(ModelUnavailable, match="mask_embedding"):
        build(block_config())


def test_the_config_file_is_checked(tmp_path):
    save_drafter(tmp_path, tiny_llama())
    assert BlockModelConfig.read(tmp_path) == block_config()
    path = tmp_path / "config.json"
    good = path.read_text()
    path.write_text(good.replace('"vocab_size"', '"vocabulary"'))
    with pytest.raises(InvalidConfig, match="vocab_size"):
        BlockModelConfig.read(tmp_path)
    path.write_text(good.replace('"default"', '"yarn"'))
    with pytest.raises(InvalidConfig, match="rotary"):
        BlockModelConfig.read(tmp_path)
    path.write_text(good.replace("{", '{"attention_bias": true,', 1))
    with pytest.raises(InvalidConfig, match="biases"):
        BlockModelConfig.read(tmp_path)
    path.unlink()
    with pytest.raises(ModelUnavailable):
        BlockModelConfig.read(tmp_path)


def test_a_draft_vocab_selects_rows_of_the_output_matrix():
    llama = tiny_llama()
    weights, table = block_weights(llama), llama.model.embed_tokens.weight.detach()

    def build(draft_vocab: Tensor) -> BlockModel:
        tensors = {**weights, "draft_vocab": draft_vocab}
        return BlockModel(block_config(), tensors, table, table, dtype=torch.float32, device=torch.device("cpu"))

    hidden = torch.randn(2, 32)
    model = build(torch.tensor([3, 7, 40, 99], dtype=torch.int32))
    np.testing.assert_allclose(model.logits(hidden), block_model(llama).logits(hidden)[:, [3, 7, 40, 99]], atol=1e-5)
    assert model.draft_vocab is not None and model.draft_vocab.tolist() == [3, 7, 40, 99]
    assert [model.num_columns(size) for size in (3, 41, 100)] == [0, 3, 4]
    for bad in ([3, 3], [7, 3], [-1, 4], [4, VOCAB_SIZE], []):
        with pytest.raises(InvalidConfig, match="draft_vocab"):
            build(torch.tensor(bad, dtype=torch.int32))
    with pytest.raises(InvalidConfig, match="draft_vocab"):
        build(torch.tensor([1.0, 2.0]))


def test_a_row_in_8_bits_does_not_depend_on_its_neighbours():
    generator = torch.Generator().manual_seed(0)
    product = int8_linear(torch.randn(48, 32, generator=generator))
    x = torch.randn(9, 32, generator=generator) * torch.logspace(-2, 2, 9)[:, None]
    together = product(x)
    assert all(torch.equal(product(x[i : i + 1])[0], together[i]) for i in range(9))
    assert torch.equal(product(torch.zeros(2, 32)), torch.zeros(2, 48))
