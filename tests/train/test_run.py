from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specdiff_dist.config import Effort
from specdiff_dist.drafters import load_drafter
from specdiff_dist.errors import InvalidConfig
from specdiff_dist.train.answers import AnswerStore, write_meta, write_shard
from specdiff_dist.train.batches import BatchOptions
from specdiff_dist.train.run import NetworkOptions, RunOptions, make_drafter
from specdiff_dist.train.start import from_drafter, from_verifier
from specdiff_dist.train.trainer import TrainOptions
from specdiff_dist.types import DraftCall, PrefixStatement, SamplingParams, prefix_crc
from tests.tiny_models import VOCAB_SIZE, save_drafter, save_verifier, tiny_llama
from tests.train.toy_answers import counting_answers


def save_answers(folder: Path, count: int = 80) -> AnswerStore:
    folder.mkdir(parents=True)
    write_meta(folder, {"sources": ["counting"], "verifier": "tiny"})
    toys = counting_answers(count)
    write_shard(folder, 0, [toys.answer(i) for i in range(count)])
    return AnswerStore.open(folder)


def test_from_answers_to_a_drafter_that_drafts(tmp_path):
    verifier = save_verifier(tmp_path / "verifier", tiny_llama(num_hidden_layers=4), num_words=VOCAB_SIZE - 5)
    options = RunOptions(
        TrainOptions(num_steps=200, learning_rate=5e-3, num_evaluations=2),
        NetworkOptions(num_layers=2, draft_vocab=30),
        BatchOptions(answers_per_batch=4, blocks_per_answer=8, block_size=4),
        device="cpu",
    )
    lines: list[dict] = []
    made = make_drafter(
        tmp_path,
        save_answers(tmp_path / "data"),
        "tiny",
        verifier,
        options,
        command="specdiff x",
        on_progress=lines.append,
    )
    assert made.after.accepted_greedy > made.before.accepted_greedy + 1.0
    assert {"step", "evaluation", "start"} <= {line["event"] for line in lines}

    config = json.loads((made.folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 2 and config["initial_layers"] == [0, 3] and config["max_block_size"] == 4
    assert np.array(config["calibration"]["table"]).shape == (4, 16)
    assert config["training"]["data"]["sources"] == ["counting"] and config["training"]["num_steps"] == 200
    card = (made.folder / "README.md").read_text()
    assert "specdiff x" in card and "30 most frequent" in card and "counting" in card
    tensors = load_file(made.folder / "drafter.safetensors")
    assert tensors["draft_vocab"].dtype == torch.int32 and len(tensors["draft_vocab"]) == 30
    assert {tensor.dtype for name, tensor in tensors.items() if name != "draft_vocab"} == {torch.bfloat16}

    drafter = load_drafter(str(made.folder), verifier=str(verifier), dtype="float32", device="cpu")
    assert drafter.info.max_draft_tokens == 4
    tokens = np.array([3, 4, 5, 6], np.int32)
    prefix = PrefixStatement("s", 0, 0, prefix_crc(tokens[:0]), tokens)
    block = drafter.draft(DraftCall(prefix, 4, Effort(), SamplingParams(0.0), 8, 0))
    assert block.token_ids.tolist() == [7, 8, 9, 0]

    size = (made.folder / "drafter.safetensors").stat().st_size
    answers = AnswerStore.open(tmp_path / "data")
    num_lines = len([line for line in lines if line["event"] == "step"])
    small = make_drafter(
        tmp_path,
        answers,
        "tiny",
        verifier,
        replace(options, export_int8=True),
        command="specdiff x",
        on_progress=lines.append,
    )
    assert len([line for line in lines if line["event"] == "step"]) == num_lines  # trained already
    assert (small.folder / "drafter.safetensors").stat().st_size < 0.65 * size
    drafter = load_drafter(str(small.folder), verifier=str(verifier), dtype="float32", device="cpu")
    assert drafter.draft(DraftCall(prefix, 4, Effort(), SamplingParams(0.0), 8, 0)).token_ids.tolist() == [7, 8, 9, 0]

    again = from_drafter(made.folder, verifier, layers=[1], block_size=4)
    name = "mlp.up_proj.weight"
    assert torch.allclose(again.weights[f"model.layers.0.{name}"], tensors[f"model.layers.1.{name}"].float(), atol=1e-2)


def test_a_network_starts_from_layers_of_the_verifier(tmp_path):
    llama = tiny_llama(num_hidden_layers=5)
    verifier = save_verifier(tmp_path / "verifier", llama)
    start = from_verifier(verifier, num_layers=3, block_size=8)
    assert start.layers == (0, 2, 4) and start.config.num_hidden_layers == 3 and start.config.max_block_size == 8
    down = "mlp.down_proj.weight"
    assert torch.equal(start.weights[f"model.layers.1.{down}"], llama.state_dict()[f"model.layers.2.{down}"])
    assert from_verifier(verifier, num_layers=9, layers=[4, 0], block_size=8).layers == (4, 0)
    for bad in ([], [0, 0], [5], [-1]):
        with pytest.raises(InvalidConfig, match="layers"):
            from_verifier(verifier, num_layers=1, layers=bad, block_size=8)
    with pytest.raises(InvalidConfig, match="only 5"):
        from_verifier(verifier, num_layers=6, block_size=8)


def test_a_drafter_of_another_verifier_is_no_start(tmp_path):
    drafter = save_drafter(tmp_path / "drafter", tiny_llama())
    other = save_verifier(tmp_path / "other", tiny_llama(hidden_size=64))
    with pytest.raises(InvalidConfig, match="another verifier"):
        from_drafter(drafter, other, block_size=8)
