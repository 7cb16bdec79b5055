"""A training run on toy answers, also as a process of its own (or one of torchrun's): tiny_run.py FOLDER STEPS."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from specdiff_dist.train.batches import Batches, BatchOptions
from specdiff_dist.train.network import DraftNetwork
from specdiff_dist.train.processes import joined
from specdiff_dist.train.trainer import Trained, Trainer, TrainOptions
from tests.tiny_models import VOCAB_SIZE, block_config, block_weights, tiny_llama
from tests.train.toy_answers import counting_answers


def train(folder: Path, **options) -> Trained:
    llama = tiny_llama()
    table = llama.model.embed_tokens.weight.detach()
    network = DraftNetwork(block_config(), table, table)
    network.load_state_dict(block_weights(llama))
    batches = Batches(counting_answers(60), BatchOptions(2, 6, 4), vocab_size=VOCAB_SIZE)
    chosen = {"learning_rate": 3e-3, "warmup_steps": 8, "num_evaluations": 3, "patience": 100, **options}
    if "minutes" not in chosen:
        chosen.setdefault("num_steps", 60)
    return Trainer(network, batches, TrainOptions(**chosen), folder).run()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined("cpu"):
        train(Path(sys.argv[1]), num_steps=int(sys.argv[2]), checkpoint_every_s=0.0)
