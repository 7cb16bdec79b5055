"""The real pair: the shipped weights must go on agreeing with the embedded verifier about as often as their card says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specdiff_dist import load_pair
from specdiff_dist.drafters import with_copying
from specdiff_dist.drafters.draft_choice import BLOCK_DRAFT_COST, BLOCK_TOKEN_COST, DRAFT_COST, TOKEN_COST
from specdiff_dist.models import ModelFolder
from specdiff_dist.types import VerifierInfo
from specdiff_dist.verifiers.device import INT4
from tests.doubles import Direct, TableDrafter

NUM_QUESTIONS, NUM_TOKENS = 4, 48


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_the_shipped_weights_agree_with_the_verifier(embedded_model: ModelFolder, gsm8k: Path, dtype: str):
    questions = [
        json.loads(line)["question"] for line in gsm8k.read_text(encoding="utf-8").splitlines()[:NUM_QUESTIONS]
    ]
    with load_pair(embedded_model.name, drafter="diffusion", drafter_dtype=dtype, device="cpu") as pair:
        answers = [
            pair.generate(one, temperature=0.0, max_tokens=NUM_TOKENS, quality={"speculation": 4}, ignore_eos=True)
            for one in questions
        ]
    rounds = [one for answer in answers for one in answer.rounds if one.num_verified]
    accepted = np.array([one.num_accepted for one in rounds])
    assert np.mean(accepted >= 1) > 0.45
    assert 1 + accepted.mean() > 1.6


@pytest.mark.parametrize("dtype", ["int4", "float32", "bfloat16"])
def test_the_combined_drafter_knows_what_its_drafts_cost_beside_this_verifier(dtype: str):
    verifier = VerifierInfo("v", 10, 100, (0,), dtype)
    choice = with_copying(Direct(TableDrafter(10)), verifier)._new_choice()
    in_blocks = dtype == INT4
    assert (choice._draft_cost, choice._token_cost) == (
        (BLOCK_DRAFT_COST, BLOCK_TOKEN_COST) if in_blocks else (DRAFT_COST, TOKEN_COST)
    )
