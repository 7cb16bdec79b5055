"""What a round costs in bytes: exact numbers of synthetic rounds, so the goals are tested as they are."""

from __future__ import annotations

import numpy as np
import pytest

from specdiff_dist.bench.wire import (
    FEATURES,
    FLAT,
    FULL,
    TRUNCATED,
    PreparedDrafter,
    PreparedVerifier,
    Shape,
    make_cases,
    measure_bytes,
    messages,
)
from specdiff_dist.bench.wire_rounds import NARROW, WIDE, make_round
from specdiff_dist.core.acceptance import accept
from specdiff_dist.core.rules import Lossless
from specdiff_dist.transport.grpc_client import GrpcDrafter, GrpcVerifier
from specdiff_dist.transport.grpc_server import start_drafter_server, start_verifier_server
from tests.transport.doubles import same_arrays

SMALL = Shape(vocab_size=500, block=4, draft_top_k=8)


@pytest.fixture(scope="module")
def cases():
    return make_cases(Shape(), 10)


@pytest.mark.parametrize(("case", "limit"), [(TRUNCATED, 20_000), (FLAT, 20_000), (FULL, 48_000)])
def test_a_round_is_a_few_kilobytes_at_a_vocabulary_of_152k(cases, case, limit):
    found = measure_bytes(cases[case])
    assert found.bytes_per_round <= limit
    assert sum(found.bytes_by_message.values()) == pytest.approx(found.bytes_per_round, rel=0.1)  # medians of each
    assert Shape().dense_bytes == 19_447_808


def test_features_are_what_a_round_of_a_drafter_with_them_mostly_is(cases):
    for name, size in FEATURES.items():
        bytes_by_message = measure_bytes(cases[name]).bytes_by_message
        assert bytes_by_message["verify_reply"] > 17 * 2 * size
        assert bytes_by_message["draft_call"] > 2 * 2 * size


def test_the_rows_are_realistic(cases):
    """Certain and uncertain positions; drafts are sometimes accepted, sometimes not; wide targets are not truncated."""
    lengths = np.concatenate([one.target.rows.row_lengths for one in cases[TRUNCATED]])
    assert lengths.min() <= 3 and lengths.max() >= 40
    accepted = []
    for one in cases[TRUNCATED]:
        uniforms = np.random.default_rng(3).random(17)
        call, block = one.verify_call, one.block
        outcome = accept(Lossless(), block.token_ids, block.proposals, one.target, uniforms[:16], uniforms)
        accepted.append(outcome.num_accepted)
        assert len(call.draft_token_ids) == 16
    assert 0 < np.mean(accepted) < 16
    wide = cases[FULL][0].target
    assert wide.is_wide and np.all(wide.rows.row_sums() < 1.0)


@pytest.mark.parametrize("sampling", [NARROW, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize("feature_size", [0, 6])
async def test_prepared_engines_answer_every_round_with_its_own_rows(sampling, feature_size):
    """Through real transports: calls and replies pass every check."""
    rounds = [
        make_round(sampling, vocab_size=500, block=4, draft_top_k=8, seed=seed, feature_size=feature_size)
        for seed in range(3)
    ]
    servers = [
        await start_drafter_server(PreparedDrafter(SMALL, rounds)),
        await start_verifier_server(PreparedVerifier(SMALL, rounds)),
    ]
    drafter, verifier = GrpcDrafter(servers[0].address), GrpcVerifier(servers[1].address)
    for one in rounds:
        block, target = await drafter.draft(one.draft_call), await verifier.verify(one.verify_call)
        assert same_arrays(block, one.block) and same_arrays(target, one.target)
        sent = {name: len(message) for name, message in messages(one).items()}
        assert (block.cost.bytes_sent, target.cost.bytes_sent) == (sent["draft_call"], sent["verify_call"])
        # A replica's measured times take a few bytes more or less than the prepared ones.
        assert abs(target.cost.bytes_received - sent["verify_reply"]) < 20
    for role, server in zip((drafter, verifier), servers, strict=True):
        await role.close()
        await server.stop(0)
