from __future__ import annotations

import numpy as np
import torch

from specdiff_dist.drafters.block_model import MASK_ID, BlockModel
from specdiff_dist.train.batches import Batches, BatchOptions
from specdiff_dist.train.evaluation import observe, summarise
from specdiff_dist.train.network import DraftNetwork
from tests.tiny_models import VOCAB_SIZE, block_config, block_weights, tiny_llama
from tests.train.toy_answers import answers_of


def test_outcomes_are_what_the_drafter_would_have_got():
    """Against the drafter itself, one block at a time, on the held-out answers."""
    llama = tiny_llama()
    answers, table = answers_of(llama, count=41), llama.model.embed_tokens.weight.detach()
    network = DraftNetwork(block_config(), table, table)
    network.load_state_dict(block_weights(llama))
    model = BlockModel(
        block_config(), block_weights(llama), table, table, dtype=torch.float32, device=torch.device("cpu")
    )
    batches = Batches(answers, BatchOptions(2, 4, 4), vocab_size=VOCAB_SIZE)
    found = observe(network, batches.held_out_batches(max_answers=3, blocks_per_answer=100))
    row = 0
    for number, index in enumerate((0, 20, 40)):
        answer = answers.answer(index)
        tokens = torch.from_numpy(answer.token_ids.astype(np.int64))
        for anchor in range(answer.prompt_length - 1, len(tokens) - 1):
            block = torch.tensor([int(tokens[anchor]), MASK_ID, MASK_ID, MASK_ID])
            logits = model.logits(model.forward(model.new_cache(), tokens[:anchor], block))
            probs, drafted = torch.softmax(logits, dim=-1).amax(dim=-1), logits.argmax(dim=-1)
            assert found.answer[row] == number
            is_reached = True
            for slot in range(4):
                at = anchor + slot + 1 - answer.prompt_length
                assert found.is_known[row, slot] == (at < len(answer.top_ids))
                if found.is_known[row, slot]:
                    assert found.is_match[row, slot] == (int(drafted[slot]) == answer.top_ids[at, 0])
                    np.testing.assert_allclose(found.confidence[row, slot], probs[slot], atol=1e-5)
                    assert found.is_reached[row, slot] == is_reached
                    is_reached &= int(drafted[slot]) == int(tokens[anchor + slot + 1])
            row += 1
    assert row == len(found.answer) == summarise(found).num_blocks
