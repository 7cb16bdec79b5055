from __future__ import annotations

import numpy as np
import pytest
import torch

from specdiff_dist.drafters.block_model import BlockModel
from specdiff_dist.train.batches import Batches, BatchOptions
from specdiff_dist.train.network import DraftNetwork
from tests.tiny_models import VOCAB_SIZE, block_config, block_weights, tiny_llama
from tests.train.toy_answers import answers_of

DRAFT_VOCAB = np.sort(np.random.default_rng(3).permutation(VOCAB_SIZE)[:40])


def network_of(draft_vocab: np.ndarray | None = None, *, trains_prefix: bool = True) -> DraftNetwork:
    llama = tiny_llama()
    table = llama.model.embed_tokens.weight
    columns = None if draft_vocab is None else torch.from_numpy(draft_vocab)
    network = DraftNetwork(block_config(), table, table, columns, trains_prefix=trains_prefix)
    network.load_state_dict(block_weights(llama))
    return network


def batches_of(draft_vocab: np.ndarray | None = None, **options: int) -> Batches:
    answers = answers_of(tiny_llama(), count=24)
    chosen = BatchOptions(**{"answers_per_batch": 3, "blocks_per_answer": 6, "block_size": 5, **options})
    return Batches(answers, chosen, vocab_size=VOCAB_SIZE, draft_vocab=draft_vocab)


@pytest.mark.parametrize("draft_vocab", [None, DRAFT_VOCAB])
def test_blocks_come_out_as_in_the_drafter(draft_vocab):
    """The same weights: one packed pass over many blocks gives what the drafter computes block by block."""
    llama = tiny_llama()
    table = llama.model.embed_tokens.weight.detach()
    weights = block_weights(llama)
    if draft_vocab is not None:
        weights["draft_vocab"] = torch.from_numpy(draft_vocab)
    model = BlockModel(block_config(), weights, table, table, dtype=torch.float32, device=torch.device("cpu"))
    network, batch = network_of(draft_vocab), batches_of(draft_vocab).training_batch(0)
    with torch.no_grad():
        logits = network(batch)
    expected = []
    for first, last, block, end in zip(
        batch.prefix_splits, batch.prefix_splits[1:], batch.block_splits, batch.block_splits[1:], strict=False
    ):
        for index in range(block, end):
            prefix = batch.prefix_ids[first:last][: int(batch.anchors[index])]
            expected.append(model.logits(model.forward(model.new_cache(), prefix, batch.block_ids[index])))
    np.testing.assert_allclose(logits, torch.cat(expected)[batch.wanted], atol=1e-4)
    assert len(batch.wanted) < torch.cat(expected).shape[0]  # some positions had no loss and were left out


def test_gradients_reach_every_parameter_and_nothing_frozen():
    network, batch = network_of(), batches_of().training_batch(0)
    network(batch).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in network.parameters())
    assert not network.embedding_table.requires_grad and not network.output.requires_grad


def test_without_gradients_through_the_prefix_outputs_are_the_same():
    batch = batches_of().training_batch(0)
    whole, cut = network_of(), network_of(trains_prefix=False)
    np.testing.assert_array_equal(whole(batch).detach(), cut(batch).detach())
    for network in (whole, cut):
        network(batch).square().mean().backward()
    key, down = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight"
    assert dict(cut.named_parameters())[key].grad is not None
    assert not torch.allclose(whole.get_parameter(down).grad, cut.get_parameter(down).grad)  # pyright: ignore
