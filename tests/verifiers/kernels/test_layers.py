"""The kernels' layers against LlamaLayers on the very same matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdiff_dist.verifiers.forward import ForwardPart, forward_one
from specdiff_dist.verifiers.kernels import BlockLayers, BlockMatrix, has_block_layers, why_no_kernels
from specdiff_dist.verifiers.llama_forward import LlamaForward
from specdiff_dist.verifiers.llama_layers import LlamaLayers, LlamaShape, Weights
from tests.verifiers.kernels.test_matrix import eight_bits, four_bits

pytestmark = pytest.mark.skipif(bool(why_no_kernels()), reason=f"no kernels here: {why_no_kernels()}")

VOCAB_SIZE = 100


def shape_of(head_dim: int, kv_heads: int) -> LlamaShape:
    return LlamaShape(
        vocab_size=VOCAB_SIZE, hidden_size=96, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=kv_heads, head_dim=head_dim, rms_norm_eps=1e-5, rope_theta=10000.0,
        max_position_embeddings=512,
    )  # fmt: skip


def weights_of(shape: LlamaShape) -> dict[str, torch.Tensor]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q_size, kv_size = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    sizes = {
        "self_attn.q_proj": (q_size, hidden), "self_attn.k_proj": (kv_size, hidden), "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    tensors = {
        "model.embed_tokens.weight": eight_bits(VOCAB_SIZE, hidden),
        "model.norm.weight": torch.rand(hidden) + 0.5,
    }
    for layer in range(shape.num_hidden_layers):
        at = f"model.layers.{layer}."
        for index, (name, size) in enumerate(sizes.items()):
            tensors[f"{at}{name}.weight"] = 0.25 * four_bits(*size, seed=10 * layer + index)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = torch.rand(hidden) + 0.5
    return tensors


@pytest.fixture(params=[(32, 2), (64, 1), (96, 4), (64, 4)], ids=str)
def shape(request):
    return shape_of(*request.param)


def both(shape: LlamaShape) -> tuple[LlamaLayers, BlockLayers]:
    torch.manual_seed(0)
    weights = Weights(weights_of(shape), owner="the test's", dtype=torch.float32, device=torch.device("cpu"))
    written_out = LlamaLayers(shape, weights, BlockMatrix.exact, dtype=torch.float32, device=torch.device("cpu"))
    return written_out, BlockLayers(shape, weights, BlockMatrix.exact)


@pytest.mark.parametrize("block_only", [False, True])
def test_spans_of_causal_rows_and_blocks_give_what_the_written_out_layers_give(shape, block_only):
    outputs = []
    for layers in both(shape):
        caches, generator = [layers.new_cache() for _ in range(3)], torch.Generator().manual_seed(1)
        first = torch.randn(150 + 40 + 1, shape.hidden_size, generator=generator)
        batch = layers.place(caches, [150, 40, 1], [0, 0, 0])
        layers.forward(batch, first.clone())
        batch.commit()
        batch = layers.place(caches, [2, 0, 1], [4, 7, 1])
        x, hidden = layers.forward(
            batch, torch.randn(15, shape.hidden_size, generator=generator), wanted=[0, 2], block_only=block_only
        )
        batch.commit()
        assert [cache.length for cache in caches] == [152, 40, 2]
        assert len(x) == (12 if block_only else 15)
        kept = [(cache.keys[:, :, : cache.length], cache.values[:, :, : cache.length]) for cache in caches]
        outputs.append((x, hidden[0], hidden[2], *(tensor for pair in kept for tensor in pair)))
    for ours, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_row_is_the_same_alone_and_among_others(shape):
    torch.manual_seed(0)
    model = LlamaForward(shape, weights_of(shape), dtype=torch.float32, device=torch.device("cpu"), in_blocks=True)
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 40).astype(np.int32)
    plain = model.new_cache()
    one_by_one = torch.cat([forward_one(model, plain, tokens[i : i + 1], 1)[0] for i in range(len(tokens))])
    parts = [ForwardPart(model.new_cache(), tokens[:n], n) for n in (3, 40, 7, 1)]
    for done, part in zip(model.forward_parts(parts), parts, strict=True):
        assert torch.equal(done.logits, one_by_one[: part.num_tokens])


def test_features_are_the_outputs_of_their_layers(shape):
    torch.manual_seed(0)
    model = LlamaForward(shape, weights_of(shape), dtype=torch.float32, device=torch.device("cpu"), in_blocks=True)
    tokens = np.arange(9, dtype=np.int32)
    (all_layers,) = model.forward_parts([ForwardPart(model.new_cache(), tokens, 1, (0, 1, 2))])
    (one_layer,) = model.forward_parts([ForwardPart(model.new_cache(), tokens, 1, (1,))])
    assert all_layers.features is not None and one_layer.features is not None
    assert torch.equal(all_layers.features[:, 96:192], one_layer.features)
    assert torch.equal(all_layers.logits, one_layer.logits)


@pytest.mark.parametrize(("hidden", "head_dim"), [(96, 48), (80, 32), (96, 288)])
def test_shapes_that_do_not_fit_blocks_are_left_to_the_written_out_layers(hidden, head_dim):
    fields = {name: getattr(shape_of(32, 2), name) for name in LlamaShape.__dataclass_fields__}
    assert has_block_layers(shape_of(32, 2))
    assert not has_block_layers(LlamaShape(**{**fields, "hidden_size": hidden, "head_dim": head_dim}))
