from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdiff_dist.errors import InvalidConfig
from specdiff_dist.verifiers import load_forward, load_verifier
from specdiff_dist.verifiers.forward import ForwardPart, forward_one
from specdiff_dist.verifiers.kernels import BlockMatrix, is_in_blocks, why_no_kernels
from tests.tiny_models import save_verifier, tiny_llama

pytestmark = pytest.mark.skipif(bool(why_no_kernels()), reason=f"no kernels here: {why_no_kernels()}")


def four_bits(out: int, width: int, seed: int = 0) -> torch.Tensor:
    """As GGUF's Q4_1 stores a matrix: half-precision scale and offset for 32 weights, all 16 levels used."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 16, (out, width // 32, 32), generator=generator)
    values[..., 0], values[..., 1] = 0, 15
    scales = (0.05 + 0.1 * torch.rand(out, width // 32, 1, generator=generator)).half().float()
    offsets = (-8 * scales + 0.1 * torch.randn(scales.shape, generator=generator)).half().float()
    return (values * scales + offsets).view(out, width)


def eight_bits(out: int, width: int, seed: int = 0) -> torch.Tensor:
    """As Q8_0 does: a scale, whole numbers up to 127."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-127, 128, (out, width // 32, 32), generator=generator)
    values[..., 0] = 127
    scales = (0.01 * torch.rand(out, width // 32, 1, generator=generator) + 1e-3).half().float()
    return (values * scales).view(out, width)


@pytest.mark.parametrize("make", [four_bits, eight_bits])
@pytest.mark.parametrize("num_rows", [1, 3, 64])
@pytest.mark.parametrize("out", [64, 100])  # whole groups of the packed layout, and not
def test_the_product_is_the_matrix_product(make, num_rows, out):
    weight = make(out, 96)
    x = torch.randn(num_rows, 96, generator=torch.Generator().manual_seed(1))
    exact = x.double() @ weight.double().T
    error = (BlockMatrix.exact(weight)(x) - exact).abs().max() / exact.abs().max()
    half_error = (x.bfloat16() @ weight.bfloat16().T - exact).abs().max() / exact.abs().max()
    assert error < max(2 * half_error, 0.01)


@pytest.mark.parametrize("make", [four_bits, eight_bits])
def test_a_rows_result_does_not_depend_on_its_neighbours(make):
    product, x = BlockMatrix.exact(make(64, 96)), torch.randn(17, 96, generator=torch.Generator().manual_seed(1))
    together = product(x)
    assert all(torch.equal(product(x[i : i + 1])[0], together[i]) for i in range(17))


@pytest.mark.parametrize(
    "weight", [torch.randn(32, 64), four_bits(32, 64) + 1e-4 * torch.randn(32, 64), torch.randn(32, 48)]
)
def test_other_matrices_are_not_taken(weight):
    assert not is_in_blocks(weight)
    with pytest.raises(InvalidConfig, match="Q4_1"):
        BlockMatrix.exact(weight)


def test_blocks_of_one_number_are_blocks():
    weight = torch.zeros(32, 64)
    assert is_in_blocks(weight)
    assert torch.equal(BlockMatrix.exact(weight)(torch.ones(2, 64)), torch.zeros(2, 32))


@pytest.fixture
def folder(tmp_path):
    """A Llama folder whose matrices are 4-bit blocks and whose embedding is 8-bit blocks."""
    save_verifier(tmp_path, tiny_llama(intermediate_size=64))
    tensors = load_file(tmp_path / "model.safetensors")
    for index, (name, tensor) in enumerate(sorted(tensors.items())):
        if tensor.ndim == 2:
            make = eight_bits if "embed" in name else four_bits
            tensors[name] = make(*tensor.shape, seed=index)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def test_a_folder_of_blocks_runs_as_int4_by_itself(folder):
    engine = load_verifier(str(folder), device="cpu")
    assert engine.info.dtype == "int4"
    assert load_verifier(str(folder), dtype="bfloat16", device="cpu").info.dtype == "bfloat16"


def test_the_law_is_as_near_to_float32_as_bfloat16s(folder):
    tokens = np.random.default_rng(0).integers(0, 100, 30).astype(np.int32)
    laws = {}
    for dtype in ("float32", "bfloat16", "int4"):
        model = load_forward(folder, dtype, "cpu")
        logits, _ = forward_one(model, model.new_cache(), tokens, 30)
        laws[dtype] = torch.softmax(logits.double(), -1)
    distance = {name: 0.5 * (law - laws["float32"]).abs().sum(-1).mean() for name, law in laws.items()}
    assert 0 < distance["int4"] < 1.5 * distance["bfloat16"]


def test_verified_drafts_get_the_rows_that_plain_decoding_has(folder):
    model = load_forward(folder, "int4", "cpu")
    tokens = np.random.default_rng(0).integers(0, 100, 12).astype(np.int32)
    plain = model.new_cache()
    one_by_one = torch.cat([forward_one(model, plain, tokens[i : i + 1], 1)[0] for i in range(12)])
    block, _ = forward_one(model, model.new_cache(), tokens, 12)
    assert torch.equal(one_by_one.argmax(-1), block.argmax(-1))
    np.testing.assert_allclose(one_by_one, block, atol=0.1)
    parts = [ForwardPart(model.new_cache(), tokens[:n], n) for n in (3, 12, 7)]
    for done, part in zip(model.forward_parts(parts), parts, strict=True):
        np.testing.assert_allclose(done.logits, block[: part.num_tokens], atol=0.1)


def test_int4_is_refused_where_it_would_quantise(tmp_path):
    save_verifier(tmp_path, tiny_llama())
    with pytest.raises(InvalidConfig, match="Q4_1"):
        load_verifier(str(tmp_path), dtype="int4", device="cpu")
    assert load_verifier(str(tmp_path), device="cpu").info.dtype == "bfloat16"
