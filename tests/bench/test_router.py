"""`specdiff bench router`: replies that pass for real ones, latencies, the slope, and a small run over gRPC."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest

from specdiff_dist.bench.pinning import pinned, usable_cores
from specdiff_dist.bench.router import DRAFT_S, VERIFY_S, RouterBench, RouterLoad, RouterPoint, measure_router
from specdiff_dist.bench.synthetic_pair import PairShape, SyntheticPair
from specdiff_dist.bench.synthetic_replicas import running_replicas
from specdiff_dist.config import DecodeConfig, Effort, Static
from specdiff_dist.engine import decode
from specdiff_dist.pictures import draw_router
from specdiff_dist.transport.checks import check_draft_block, check_target_rows
from specdiff_dist.types import DraftCall, GenerateRequest, PrefixStatement, ResolveCall, SamplingParams, VerifyCall

SMALL = PairShape(vocab_size=500, support=10, block=4, num_blocks=8)
FEATURED = dataclasses.replace(SMALL, feature_layers=(0, 2), num_layers=3, hidden_size=4)
SAMPLING = SamplingParams(0.7, 50, 0.95)


class PairDrafter:
    """The pair's drafter as a role; replies are judged as a transport judges them."""

    def __init__(self, pair: SyntheticPair) -> None:
        self._pair = pair
        self.calls: list[DraftCall] = []

    async def info(self):
        return self._pair.drafter_info

    async def draft(self, call: DraftCall):
        block = self._pair.draft(call, 0.01)
        check_draft_block(block, call, self._pair.drafter_info)
        self.calls.append(call)
        return block

    async def release(self, session_id: str) -> None:
        pass


class PairVerifier:
    def __init__(self, pair: SyntheticPair) -> None:
        self._pair = pair

    async def info(self):
        return self._pair.verifier_info

    async def verify(self, call: VerifyCall):
        rows = self._pair.verify(call, 0.05)
        check_target_rows(rows, call, self._pair.verifier_info)
        return rows

    async def resolve(self, call: ResolveCall):
        raise AssertionError("narrow rows are decided by the router")

    async def release(self, session_id: str) -> None:
        pass


@pytest.mark.parametrize("shape", [SMALL, FEATURED], ids=["plain", "features"])
async def test_the_round_loop_takes_the_replies_for_real(shape: PairShape) -> None:
    pair = SyntheticPair(shape)
    drafter, verifier = PairDrafter(pair), PairVerifier(pair)
    request = GenerateRequest("one", tuple(range(20)), SAMPLING, seed=1, max_tokens=200)
    chunks = [chunk async for chunk in decode(request, DecodeConfig(policy=Static(4)), drafter, verifier, tier="exact")]
    receipt = chunks[-1].receipt
    assert receipt is not None and receipt.num_tokens == 200 and not receipt.degraded
    assert receipt.verifier_rebuilds == 0  # what replies say of their caches is what the loop believes
    assert 1.5 < receipt.mean_acceptance_length < 4.5  # neither hopeless nor perfect
    assert (drafter.calls[-1].features is not None) == bool(shape.feature_layers)


def test_both_replicas_mean_the_same_block() -> None:
    drafter, verifier = SyntheticPair(SMALL), SyntheticPair(SMALL)
    prefix = PrefixStatement("s", 5, 0, 0, np.array([1, 2], np.int32))
    block = drafter.draft(DraftCall(prefix, 3, Effort(), SAMPLING, 64, 0), 0.25)
    rows = verifier.verify(VerifyCall(prefix, block.token_ids, SAMPLING, None, np.zeros(4)), 0.5)
    assert block.num_tokens == 3 and rows.rows.num_rows == 4
    assert (block.cost.forward_s, rows.cost.forward_s) == (0.25, 0.5)
    assert (block.cached_len, rows.cached_len) == (1, 5)
    assert len(np.intersect1d(block.proposals.row(0)[0], rows.rows.row(0)[0])) == 8  # four fifths


def test_latencies_grow_when_more_sessions_share_the_replicas() -> None:
    load = RouterLoad(DecodeConfig(), offered_rounds_per_s=900.0, seconds=1.0)
    few, many = load.latencies(10), load.latencies(1000)
    assert (few.draft_s, few.verify_s) == (DRAFT_S, VERIFY_S)
    assert 1000 / (many.draft_s + many.verify_s) == pytest.approx(900.0)
    assert many.verify_s / many.draft_s == pytest.approx(VERIFY_S / DRAFT_S)


def point(sessions: int, cpu_us: float, verify_ms: float = 60.0) -> RouterPoint:
    return RouterPoint(sessions, 10.0, verify_ms, 800.0, 1.0, 9.0, cpu_us, 1.0, 8.0, 2.5, 7000.0)


def test_the_slope_is_per_session_and_the_headline_one_of_the_points(tmp_path) -> None:
    bench = RouterBench((point(1, 700.0), point(101, 720.0), point(1001, 900.0)), 101, point(101, 650.0))
    assert bench.slope_us_per_session == bench.loaded_slope_us_per_session == pytest.approx(0.2)
    idle = RouterBench((point(1, 3000.0, 50.0), *bench.points[1:]), 101, bench.saturated)
    assert idle.slope_us_per_session < 0.0 and idle.loaded_slope_us_per_session == pytest.approx(0.2)
    report = bench.report()
    assert report.keys() > {"rounds_per_s", "p99_added_ms", "sessions", "slope_us_per_session", "points", "saturated"}
    assert (report["sessions"], report["p99_added_ms"], len(report["points"])) == (101, 9.0, 3)
    draw_router(tmp_path / "router.png", bench)
    assert (tmp_path / "router.png").read_bytes().startswith(b"\x89PNG")


def test_pinning_is_taken_back() -> None:
    cores = usable_cores()
    if not cores:
        pytest.skip("this system does not say which cores there are")
    with pinned(cores[:1]):
        assert os.sched_getaffinity(0) == set(cores[:1])
    assert usable_cores() == cores


def test_a_small_run_over_grpc() -> None:
    load = RouterLoad(DecodeConfig(policy=Static(4)), offered_rounds_per_s=100.0, seconds=0.4)
    bench = measure_router(load, [2, 12], 12, SMALL)
    few, many = bench.points
    assert (few.draft_ms, few.verify_ms) == (10.0, 50.0)
    assert many.draft_ms == pytest.approx(20.0)
    assert 0.0 < few.rounds_per_s <= 2 / (0.8 * 0.06) and 0.0 < many.rounds_per_s <= 12 / (0.8 * 0.12)
    for one in (few, many, bench.saturated):
        assert 0.0 < one.p50_added_ms <= one.p99_added_ms
        assert one.cpu_us_per_round > 0.0 and one.bytes_per_round > 500.0
        assert one.drafts_per_round == 1.0 and one.tokens_per_round >= 1.0


def test_the_replicas_end_with_their_context() -> None:
    with running_replicas(SMALL) as replicas:
        process = replicas._process
        assert process.poll() is None
    assert process.poll() is not None
