from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdiff_dist.errors import InvalidConfig
from specdiff_dist.verifiers import llama_forward, load_forward, load_verifier
from specdiff_dist.verifiers.forward import forward_one
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
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 6, 7, 11, 12, 13, 64])
@pytest.mark.parametrize("out", [64, 100])  # whole groups of the packed layout, and not
def test_the_product_is_float32s(make, num_rows, out):
    weight = make(out, 96)
    x = torch.randn(num_rows, 96, generator=torch.Generator().manual_seed(1))
    exact = x.double() @ weight.double().T
    error = (BlockMatrix.exact(weight)(x) - exact).abs().max() / exact.abs().max()
    assert error < 1e-6


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_change_no_number(num_threads):
    product, x = BlockMatrix.exact(four_bits(160, 64)), torch.randn(5, 64)
    before = torch.get_num_threads()
    expected = product(x)
    try:
        torch.set_num_threads(num_threads)
        assert torch.equal(product(x), expected)
    finally:
        torch.set_num_threads(before)


def test_the_nearest_8_bit_blocks_are_within_their_rounding():
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    weight[3, :32] *= 1e-4  # a scale per block: its small numbers are kept beside large ones
    half_step = (weight.view(40, 2, 32).abs().amax(-1, keepdim=True) / 127 * 0.51).expand(40, 2, 32).reshape(40, 64)
    found = BlockMatrix.nearest(weight)(torch.eye(64)).T
    assert bool(((found - weight).abs() <= half_step).all())
    with pytest.raises(InvalidConfig, match="multiple of 32"):
        BlockMatrix.nearest(torch.randn(4, 40))


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


def test_the_law_is_float32s(folder):
    tokens = np.random.default_rng(0).integers(0, 100, 30).astype(np.int32)
    laws = {}
    for dtype in ("float32", "bfloat16", "int4"):
        model = load_forward(folder, dtype, "cpu")
        logits, _ = forward_one(model, model.new_cache(), tokens, 30)
        laws[dtype] = torch.softmax(logits.double(), -1)
    distance = {name: 0.5 * (law - laws["float32"]).abs().sum(-1).mean() for name, law in laws.items()}
    assert distance["int4"] < 1e-5 < distance["bfloat16"]


def test_without_a_compiler_the_verifier_runs_in_bfloat16(folder, monkeypatch, caplog):
    monkeypatch.setattr(llama_forward, "why_no_kernels", lambda: "no C++ compiler")
    assert load_verifier(str(folder), device="cpu").info.dtype == "bfloat16"
    assert "no C++ compiler" in caplog.text
    with pytest.raises(InvalidConfig, match="no C\\+\\+ compiler"):
        load_verifier(str(folder), dtype="int4", device="cpu")


def test_int4_is_refused_where_it_would_quantise(tmp_path):
    save_verifier(tmp_path, tiny_llama())
    with pytest.raises(InvalidConfig, match="Q4_1"):
        load_verifier(str(tmp_path), dtype="int4", device="cpu")
    assert load_verifier(str(tmp_path), device="cpu").info.dtype == "bfloat16"
