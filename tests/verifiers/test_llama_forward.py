"""The written-out Llama forward against transformers' own."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, MistralForCausalLM

from specdiff_dist.errors import InvalidConfig, ModelUnavailable
from specdiff_dist.verifiers import load_verifier
from specdiff_dist.verifiers.folder import read_config
from specdiff_dist.verifiers.forward import forward_one
from specdiff_dist.verifiers.llama_forward import LlamaForward, plain_llama
from tests.tiny_models import VOCAB_SIZE, save_verifier, tiny_llama, tiny_sliding


def load(folder, dtype: str = "float32") -> LlamaForward:
    shape = plain_llama(read_config(folder))
    assert shape is not None
    return LlamaForward.load(folder, shape, dtype=dtype, device="cpu")


@torch.inference_mode()
def reference(model, tokens: list[int], num_rows: int) -> np.ndarray:
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -num_rows:].float().numpy()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_logits_are_those_of_transformers_through_prefill_blocks_and_rollback(tmp_path, tied, kv_heads):
    model = tiny_llama(tie_word_embeddings=tied, num_key_value_heads=kv_heads)
    own = load(save_verifier(tmp_path, model))
    rng = np.random.default_rng(0)
    cache, tokens = own.new_cache(), []
    for num_new, keep in ((150, 150), (1, 1), (5, 2), (2, 0), (17, 17), (40, 3), (1, 1)):
        new = rng.integers(0, VOCAB_SIZE, num_new)
        num_logits = min(num_new, 7)
        logits, _ = forward_one(own, cache, new.astype(np.int32), num_logits)
        np.testing.assert_allclose(logits, reference(model, [*tokens, *new.tolist()], num_logits), atol=1e-4)
        tokens += new[:keep].tolist()
        own.crop(cache, len(tokens))


def test_bfloat16_is_as_near_to_float32_as_transformers_bfloat16_is(tmp_path):
    model = tiny_llama()
    folder = save_verifier(tmp_path, model)
    tokens = np.random.default_rng(1).integers(0, VOCAB_SIZE, 30).astype(np.int32)
    exact = reference(model, tokens.tolist(), 30)
    own = load(folder, "bfloat16")
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    own_error = np.abs(forward_one(own, own.new_cache(), tokens, 30)[0].numpy() - exact).mean()
    assert own_error < 1.5 * np.abs(reference(theirs, tokens.tolist(), 30) - exact).mean()


def test_columns_that_only_pad_the_output_matrix_are_left_out(tmp_path):
    own = load(save_verifier(tmp_path, tiny_llama(), num_words=90))
    assert own.vocab_size == 90
    assert forward_one(own, own.new_cache(), np.array([3], np.int32), 1)[0].shape == (1, 90)


def test_it_is_what_runs_a_llama_folder_and_not_others(tmp_path):
    llama: Any = load_verifier(str(save_verifier(tmp_path / "llama", tiny_llama())), dtype="float32")
    sliding: Any = load_verifier(str(save_verifier(tmp_path / "mistral", tiny_sliding(8))), dtype="float32")
    assert isinstance(llama._model, LlamaForward)
    assert isinstance(sliding._model._model, MistralForCausalLM)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "qwen3"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0}},
        {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"quantization_config": {"quant_method": "gptq"}},
    ],
)
def test_what_it_does_not_do_is_left_to_transformers(tmp_path, change):
    config = read_config(save_verifier(tmp_path, tiny_llama()))
    assert plain_llama(config) is not None
    assert plain_llama({**config, **change}) is None


def test_sharded_weights_load(tmp_path):
    model = tiny_llama()
    save_verifier(tmp_path / "whole", model)
    save_verifier(tmp_path / "shards", model)
    tensors = load_file(tmp_path / "whole/model.safetensors")
    names = sorted(tensors)
    (tmp_path / "shards/model.safetensors").unlink()
    for shard, part in (("a", names[:5]), ("b", names[5:])):
        save_file({name: tensors[name] for name in part}, tmp_path / f"shards/{shard}.safetensors")
    weight_map = {name: "a.safetensors" if name in names[:5] else "b.safetensors" for name in names}
    (tmp_path / "shards/model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    ids = np.array([1, 2, 3], np.int32)
    logits = [
        forward_one(own, own.new_cache(), ids, 3)[0] for own in (load(tmp_path / "whole"), load(tmp_path / "shards"))
    ]
    assert torch.equal(*logits)


def test_missing_and_misshapen_tensors_are_named(tmp_path):
    folder = save_verifier(tmp_path, tiny_llama())
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    with pytest.raises(ModelUnavailable, match=r"down_proj\.weight is missing"):
        load(folder)
    save_file({**tensors, name: torch.zeros(3, 3)}, file)
    with pytest.raises(ModelUnavailable, match=r"down_proj.weight is of shape \(3, 3\)"):
        load(folder)
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(ModelUnavailable, match="no lm_head"):
        load(folder)
    with pytest.raises(InvalidConfig, match="dtype"):
        load(folder, "float8")
