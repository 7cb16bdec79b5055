"""Trace files: what is written is read, and nothing else is."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from specdiff_dist.config import DecodeConfig, Linear, Static
from specdiff_dist.core.speculation import FailFast
from specdiff_dist.engine import decode
from specdiff_dist.errors import InvalidConfig
from specdiff_dist.simulate.trace import RoundTrace, TraceWriter, read_trace, write_trace
from tests.doubles import Direct, TableDrafter, TableVerifier, make_request, random_table
from tests.simulate.rounds import made_round

VOCAB = 12
packed = msgpack.Packer().pack


def same(a: RoundTrace, b: RoundTrace) -> bool:
    return all(np.allclose(getattr(a, one.name), getattr(b, one.name), rtol=0, atol=1e-7) for one in fields(RoundTrace))


async def recorded(policy: Any, *, rule: Any = None, temperature: float = 1.0) -> tuple[list[RoundTrace], list]:
    """The trace and the records of one request over tables."""
    rounds: list[RoundTrace] = []
    config = DecodeConfig(policy=policy) if rule is None else DecodeConfig(rule=rule, policy=policy)
    request = make_request(max_tokens=40, temperature=temperature, top_k=8, seed=5)
    chunks = decode(
        request, config, Direct(TableDrafter(VOCAB)), Direct(TableVerifier(random_table(VOCAB, order=2), VOCAB)),
        tier="high", recorder=rounds.append,
    )  # fmt: skip
    return rounds, [record async for chunk in chunks for record in chunk.rounds]


async def test_a_recorded_round_is_the_round():
    rounds, records = await recorded(Static(4), rule=Linear(0.3))

    assert len(rounds) == len(records) > 5
    for one, record in zip(rounds, records, strict=True):
        assert (one.length, one.num_accepted, one.num_drafted) == (
            record.num_verified, record.num_accepted, record.num_drafted,
        )  # fmt: skip
        assert one.wall_s == record.wall_s
        # The trace explains the round: its own numbers under its own rule accept exactly what was accepted.
        run = one.is_accepted(0.3)
        assert (int(np.argmin(run)) if not run.all() else one.length) == one.num_accepted
        assert np.all((one.distance >= 0) & (one.distance <= 1))


async def test_positions_behind_a_rejection_are_recorded():
    rounds, _ = await recorded(Static(4))
    assert any(one.num_accepted < one.length - 1 for one in rounds)
    assert all(len(one.target_at_token) == one.length for one in rounds)


async def test_every_draft_call_of_a_round_is_counted():
    rounds, _ = await recorded(FailFast(threshold=0.0, block=3, max_length=6))
    assert [one.num_draft_calls for one in rounds if one.length == 6] == [2] * sum(one.length == 6 for one in rounds)
    assert rounds[-1].num_draft_calls == -(-rounds[-1].length // 3)


async def test_what_is_written_is_read(tmp_path):
    rounds, _ = await recorded(Static(4))
    plain, _ = await recorded(Static(1))
    write_trace(tmp_path / "a.trace", [rounds, [], plain], {"verifier": "table", "temperature": 1.0})
    about, requests = read_trace(tmp_path / "a.trace")

    assert about == {"version": 1, "verifier": "table", "temperature": 1.0}
    assert [len(one) for one in requests] == [len(rounds), 0, len(plain)]
    assert all(same(a, b) for a, b in zip(rounds + plain, requests[0] + requests[2], strict=True))


def test_a_trace_is_readable_after_every_request(tmp_path):
    with TraceWriter(tmp_path / "a.trace", {}) as writer:
        for count in range(3):
            assert len(read_trace(tmp_path / "a.trace")[1]) == count
            writer.write([made_round([0.5])])


def test_an_unwritable_place_is_said(tmp_path):
    with pytest.raises(InvalidConfig, match="cannot write the trace"):
        TraceWriter(tmp_path / "nowhere" / "a.trace", {})


def plain_round(**changes: Any) -> dict[str, Any]:
    array = np.array([0.5, 0.25], "<f4").tobytes()
    names = (
        "token_probs", "max_probs", "sum_squares", "target_at_token", "draft_at_token", "distance", "accept_uniforms",
    )  # fmt: skip
    counts = {"num_accepted": 1, "num_drafted": 2, "num_draft_calls": 1}
    return {
        **dict.fromkeys(names, array), **counts, "draft_s": 0.1, "verify_s": 0.2, "wall_s": 0.3, **changes,
    }  # fmt: skip


def write(path: Path, *items: object) -> Path:
    path.write_bytes(b"".join(map(packed, items)))
    return path


HEADER = {"version": 1}


def test_the_plain_round_of_these_tests_is_fine(tmp_path):
    assert read_trace(write(tmp_path / "a", HEADER, [plain_round()]))[1][0][0].num_accepted == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"token_probs": np.array([0.5], "<f4").tobytes()},
        {"token_probs": b"123"},
        {"token_probs": "text"},
        {"token_probs": None},
        {"distance": np.array([0.5, np.nan], "<f4").tobytes()},
        {"max_probs": np.array([0.5, 1.5], "<f4").tobytes()},
        {"target_at_token": np.array([0.5, -0.5], "<f4").tobytes()},
        {"draft_at_token": np.array([0.5, 0.0], "<f4").tobytes()},
        {"num_accepted": 3},
        {"num_accepted": -1},
        {"num_accepted": True},
        {"num_drafted": 1},
        {"num_drafted": 2.0},
        {"wall_s": float("nan")},
        {"wall_s": -1.0},
        {"verify_s": "fast"},
        {"surprise": 1},
    ],
)
def test_a_wrong_round_is_refused(tmp_path, changes):
    with pytest.raises(InvalidConfig, match="cannot read the trace"):
        read_trace(write(tmp_path / "a", HEADER, [plain_round(**changes)]))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello, I am a text file",
        packed([1, 2]),
        packed({"version": 2}),
        packed(HEADER) + packed(3),
        packed(HEADER) + packed([3]),
        packed(HEADER) + packed([{}]),
        packed(HEADER) + packed([plain_round()])[:-3],
        packed(HEADER) + b"\xc1",
        packed(HEADER) + b"\x91" * 3000,
        packed(HEADER) + b"\xdd\xff\xff\xff\xff",
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(InvalidConfig):
        read_trace(tmp_path / "a")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match="cannot read the trace"):
        read_trace(tmp_path / "nothing")
