"""The real pair: the shipped weights must go on agreeing with the embedded verifier about as often as their card says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specdiff_dist import load_pair
from specdiff_dist.drafters import load_drafter
from specdiff_dist.drafters.combined import CombinedDrafter
from specdiff_dist.drafters.draft_choice import BLOCK_DRAFT_COST, BLOCK_TOKEN_COST, DRAFT_COST, TOKEN_COST
from specdiff_dist.models import ModelFolder
from specdiff_dist.verifiers.kernels import why_no_kernels

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


@pytest.mark.skipif(bool(why_no_kernels()), reason=f"no kernels here: {why_no_kernels()}")
def test_the_combined_drafter_knows_what_its_drafts_cost_beside_this_verifier(embedded_model: ModelFolder):
    costs = {}
    for dtype in ("auto", "int4", "float32"):
        drafter = load_drafter("combined", verifier=embedded_model.name, device="cpu", verifier_dtype=dtype)
        assert isinstance(drafter, CombinedDrafter)
        choice = drafter._sessions.get("session").cache
        costs[dtype] = choice._draft_cost, choice._token_cost
    assert costs["auto"] == costs["int4"] == (BLOCK_DRAFT_COST, BLOCK_TOKEN_COST)
    assert costs["float32"] == (DRAFT_COST, TOKEN_COST)
