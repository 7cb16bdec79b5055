"""Makes answers in a process of its own, which a test kills: MODEL PROMPTS FOLDER NUM_ANSWERS."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from specdiff_dist.train.data import DataSettings, make_answers

SETTINGS = DataSettings(max_new_tokens=40, max_prompt_tokens=64, shard_size=12, batch_size=8, self_written=0.4)

if __name__ == "__main__":
    torch.set_num_threads(1)
    make_answers(sys.argv[1], [Path(sys.argv[2])], [], int(sys.argv[4]), Path(sys.argv[3]), settings=SETTINGS)
