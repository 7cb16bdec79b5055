"""Drafter weights on disk, in 16 and in 8 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specdiff_dist.drafters.linear import has_int8, int8_linear
from specdiff_dist.drafters.weights_file import in_8_bits, load_weights
from specdiff_dist.errors import ModelUnavailable


def some_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(24, 16, generator=generator)
    matrix[3] = 0.0
    return {
        "layer.weight": matrix.bfloat16(),
        "norm.weight": torch.ones(16, dtype=torch.bfloat16),
        "draft_vocab": torch.arange(5, dtype=torch.int32),
    }


def test_matrices_are_halved_and_come_back_within_half_a_step(tmp_path: Path):
    weights = some_weights()
    stored = in_8_bits(weights)
    assert stored["layer.weight"].dtype == torch.int8
    save_file(stored, tmp_path / "drafter.safetensors")
    loaded = load_weights(tmp_path)
    assert loaded.keys() == weights.keys()
    matrix = weights["layer.weight"].float()
    step = matrix.abs().amax(dim=1, keepdim=True) / 127.0
    assert torch.all((loaded["layer.weight"] - matrix).abs() <= 0.5 * step + 1e-7)
    assert torch.equal(loaded["norm.weight"], weights["norm.weight"])
    assert torch.equal(loaded["draft_vocab"], weights["draft_vocab"])


@pytest.mark.skipif(not has_int8(), reason="this torch has no 8-bit products for this CPU")
def test_an_8_bit_drafter_computes_with_the_same_numbers(tmp_path: Path):
    weights = some_weights()
    save_file(in_8_bits(weights), tmp_path / "drafter.safetensors")
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    direct, restored = int8_linear(weights["layer.weight"]), int8_linear(load_weights(tmp_path)["layer.weight"])
    assert torch.allclose(direct(x), restored(x), rtol=1e-5, atol=1e-6)


def test_faults_are_named(tmp_path: Path):
    with pytest.raises(ModelUnavailable, match="one safetensors file, not 0"):
        load_weights(tmp_path)
    stored = in_8_bits(some_weights())
    del stored["layer.weight_scale"]
    save_file(stored, tmp_path / "drafter.safetensors")
    with pytest.raises(ModelUnavailable, match=r"layer\.weight is in 8 bits and lacks layer\.weight_scale"):
        load_weights(tmp_path)
    (tmp_path / "drafter.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelUnavailable, match="cannot read"):
        load_weights(tmp_path)
