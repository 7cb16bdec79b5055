"""The features architecture in training: on disk, in the network, from answers to a drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdiff_dist.config import DecodeConfig, Static
from specdiff_dist.drafters import load_drafter
from specdiff_dist.drafters.block_model import BlockModel
from specdiff_dist.engine import decode
from specdiff_dist.errors import InvalidConfig
from specdiff_dist.train import features as train_features
from specdiff_dist.train.answers import AnswerStore, write_meta, write_shard
from specdiff_dist.train.batches import Batches, BatchOptions
from specdiff_dist.train.features import FeatureStore, make_features
from specdiff_dist.train.network import DraftNetwork
from specdiff_dist.train.run import NetworkOptions, RunOptions, make_drafter
from specdiff_dist.train.start import from_drafter, from_verifier, with_features
from specdiff_dist.train.trainer import TrainOptions
from specdiff_dist.verifiers import load_verifier
from tests.doubles import Direct, make_request
from tests.tiny_models import HIDDEN_SIZE, VOCAB_SIZE, save_verifier, tiny_llama
from tests.train.toy_answers import answers_of, counting_answers

CPU = torch.device("cpu")
LAYERS = (0, 2)


@pytest.fixture
def verifier(tmp_path) -> Path:
    return save_verifier(tmp_path / "verifier", tiny_llama(num_hidden_layers=4))


def saved(folder: Path, toys: Any, per_shard: int) -> AnswerStore:
    folder.mkdir(parents=True)
    write_meta(folder, {"sources": ["toy"], "verifier": "tiny"})
    every = [toys.answer(index) for index in range(toys.num_answers)]
    for number, start in enumerate(range(0, len(every), per_shard)):
        write_shard(folder, number, every[start : start + per_shard])
    return AnswerStore.open(folder)


def test_features_are_made_once_and_read_by_answer(tmp_path, verifier, monkeypatch):
    answers = saved(tmp_path / "data", answers_of(tiny_llama(), count=24), 10)
    lines: list[dict] = []
    made = make_features(tmp_path / "features", answers, verifier, LAYERS, device=CPU, on_progress=lines.append)
    assert made == tmp_path / "features" / "0-2" and lines[-1] == {"event": "features", "done": 24, "total": 24}
    files = sorted(made.glob("shard-*.npy"))
    assert len(files) == 3
    store = FeatureStore(made, answers, 2 * HIDDEN_SIZE)
    model: Any = tiny_llama(num_hidden_layers=4)
    for index in (0, 9, 10, 23):
        tokens = torch.from_numpy(answers.answer(index).token_ids.astype(np.int64))[None]
        with torch.inference_mode():
            states = model(input_ids=tokens, output_hidden_states=True).hidden_states
        expected = torch.cat([states[1], states[3]], dim=-1)[0]
        np.testing.assert_allclose(store.of(index), expected, rtol=2e-3, atol=2e-3)

    stamps = [path.stat().st_mtime_ns for path in files]
    files[1].unlink()
    asked: list[dict] = []
    make_features(
        tmp_path / "features", answers, verifier, LAYERS, device=CPU, rank=0, world=2, on_progress=asked.append
    )
    assert asked == [] and not files[1].exists()  # another process's share
    make_features(
        tmp_path / "features", answers, verifier, LAYERS, device=CPU, rank=1, world=2, on_progress=asked.append
    )
    assert asked[-1]["total"] == 10 and [path.stat().st_mtime_ns for path in (files[0], files[2])] == [
        stamps[0],
        stamps[2],
    ]
    monkeypatch.setattr(train_features, "_features", None)  # nothing is left to compute
    make_features(tmp_path / "features", answers, verifier, LAYERS, device=CPU)

    with pytest.raises(InvalidConfig, match="float16"):
        FeatureStore(made, answers, 3 * HIDDEN_SIZE)
    files[2].write_bytes(files[2].read_bytes()[:100])
    with pytest.raises(InvalidConfig, match="remove it"):
        FeatureStore(made, answers, 2 * HIDDEN_SIZE)
    with pytest.raises(InvalidConfig, match="feature layers"):
        make_features(tmp_path / "features", answers, verifier, (7,), device=CPU)


def test_blocks_come_out_as_in_the_drafter(tmp_path, verifier):
    """The same weights and features: what is trained is what is served."""
    answers = saved(tmp_path / "data", answers_of(tiny_llama(), count=24), 24)
    start = with_features(from_verifier(verifier, num_layers=3, layers=(0, 1, 3), block_size=5), LAYERS)
    assert start.config.feature_sources == (-1, 0, 1)
    generator = torch.Generator().manual_seed(3)
    weights = dict(start.weights)
    for name in ("feature_fusion.weight", "feature_norm.weight"):
        weights[name] = weights[name] + 0.2 * torch.randn(weights[name].shape, generator=generator)
    network = DraftNetwork(start.config, start.embedding, start.output)
    network.load_state_dict(weights)
    model = BlockModel(start.config, weights, start.embedding, start.output, dtype=torch.float32, device=CPU)
    made = make_features(tmp_path / "features", answers, verifier, LAYERS, device=CPU)
    store = FeatureStore(made, answers, start.config.feature_size)
    batches = Batches(answers, BatchOptions(3, 6, 5), vocab_size=VOCAB_SIZE, features=store)
    batch = batches.training_batch(0)
    assert batch.prefix_features is not None and batch.prefix_features.dtype == torch.float16
    expected = []
    for first, last, block, end in zip(
        batch.prefix_splits, batch.prefix_splits[1:], batch.block_splits, batch.block_splits[1:], strict=False
    ):
        for index in range(block, end):
            before = slice(first, first + int(batch.anchors[index]))
            assert before.stop <= last
            cache = model.new_cache()
            model.remember(cache, batch.prefix_ids[before], batch.prefix_features[before])
            hidden = model.forward(cache, batch.prefix_ids[:0], batch.block_ids[index])
            expected.append(model.logits(hidden))
    with torch.no_grad():
        np.testing.assert_allclose(network(batch), torch.cat(expected)[batch.wanted], atol=1e-4)

    network(batch).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in network.parameters())
    with pytest.raises(InvalidConfig, match="features of the prefixes"):
        network(Batches(answers, BatchOptions(3, 6, 5), vocab_size=VOCAB_SIZE).training_batch(0))


async def test_from_answers_to_a_drafter_that_reads_features(tmp_path, verifier):
    answers = saved(tmp_path / "data", counting_answers(60), 60)
    options = RunOptions(
        TrainOptions(num_steps=100, learning_rate=5e-3, num_evaluations=2, warmup_steps=8),
        NetworkOptions(num_layers=2, draft_vocab=30, architecture="features"),
        BatchOptions(answers_per_batch=4, blocks_per_answer=8, block_size=4),
        device="cpu",
    )
    made = make_drafter(tmp_path, answers, "tiny", verifier, options, command="specdiff x")
    assert made.after.accepted_greedy > made.before.accepted_greedy + 0.3
    config = json.loads((made.folder / "config.json").read_text())
    assert (
        config["feature_layers"] == [2] and config["feature_sources"] == [-1, 0] and config["initial_layers"] == [0, 3]
    )
    assert "hidden states after its layers 2" in (made.folder / "README.md").read_text()

    drafter = load_drafter(str(made.folder), verifier=str(verifier), dtype="float32", device="cpu")
    judge = load_verifier(str(verifier), dtype="float32", device="cpu")
    request = make_request((3, 4, 5, 6), max_tokens=12)
    stream = decode(request, DecodeConfig(policy=Static(3)), Direct(drafter), Direct(judge), tier="exact")
    records = [record async for chunk in stream for record in chunk.rounds]
    assert sum(record.num_drafted for record in records) > 3 and not any(record.degraded for record in records)

    more = RunOptions(
        TrainOptions(num_steps=1, warmup_steps=1, num_evaluations=1),
        NetworkOptions(initial=made.folder, draft_vocab=30, architecture="features"),
        options.batches,
        device="cpu",
    )
    again = make_drafter(tmp_path / "again", answers, "tiny", verifier, more, command="specdiff x")
    assert abs(again.before.accepted_greedy - made.after.accepted_greedy) < 0.1  # through bfloat16
    with pytest.raises(InvalidConfig, match="architecture 'features'"):
        causal = RunOptions(
            more.training, NetworkOptions(initial=made.folder, draft_vocab=30), more.batches, device="cpu"
        )
        make_drafter(tmp_path / "other", answers, "tiny", verifier, causal, command="specdiff x")


def test_a_causal_drafter_goes_on_with_features(tmp_path, verifier):
    """What its layers were in the verifier is handed on, from drafter to drafter."""
    answers = saved(tmp_path / "data", counting_answers(60), 60)
    batches = BatchOptions(answers_per_batch=4, blocks_per_answer=8, block_size=4)
    length = TrainOptions(num_steps=1, warmup_steps=1, num_evaluations=1)

    def make(name: str, **network: Any) -> Path:
        options = RunOptions(length, NetworkOptions(draft_vocab=30, **network), batches, device="cpu")
        return make_drafter(tmp_path / name, answers, "tiny", verifier, options, command="specdiff x").folder

    first = make("first", layers=(0, 2, 3))
    second = make("second", initial=first, layers=(0, 2))
    assert json.loads((second / "config.json").read_text())["verifier_layers"] == [0, 3]
    start = with_features(from_drafter(second, verifier, block_size=4), None)
    assert start.config.feature_layers == (2,) and start.config.feature_sources == (-1, 0)
    featured = json.loads((make("third", initial=second, architecture="features") / "config.json").read_text())
    assert featured["feature_layers"] == [2] and featured["verifier_layers"] == [0, 3]

    config = json.loads((second / "config.json").read_text())
    del config["verifier_layers"]
    (second / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidConfig, match="verifier_layers"):
        with_features(from_drafter(second, verifier, block_size=4), None)


def test_options_that_contradict_each_other_are_refused():
    contradictions: list[dict[str, Any]] = [
        {"architecture": "both"},
        {"feature_layers": (1,)},
        {"architecture": "features", "trains_prefix": False},
    ]
    for options in contradictions:
        with pytest.raises(InvalidConfig):
            NetworkOptions(**options)
