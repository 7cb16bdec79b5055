"""`specdiff bench wire`: what a round costs on the wire, in bytes, and what it would cost otherwise.

Bytes are those of the messages, both calls in both directions together; times come from the transports themselves
(deployments/bench_wire.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter

from specdiff_dist.bench.wire_rounds import NARROW, WIDE, WireRound, make_round
from specdiff_dist.transport import codec
from specdiff_dist.types import (
    DraftBlock,
    DraftCall,
    DrafterInfo,
    ResolveCall,
    ResolvedToken,
    TargetRows,
    VerifierInfo,
    VerifyCall,
)

TRUNCATED, FLAT, FULL = "truncated", "truncated, every row full", "full"
FEATURES = {"features, 3 layers of 576": 3 * 576, "features, 5 layers of 4096": 5 * 4096}
GZIP_LEVEL = 6  # gRPC's


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the rounds that are measured."""

    vocab_size: int = 151_936
    block: int = 16
    draft_top_k: int = 64

    @property
    def dense_bytes(self) -> int:
        """Float32 rows of the whole vocabulary from both sides."""
        return 2 * self.block * self.vocab_size * 4


def make_cases(shape: Shape, num_rounds: int) -> dict[str, list[WireRound]]:
    """`num_rounds` different rounds of each case; a tenth of them for those with features, which are large."""
    make = partial(make_round, vocab_size=shape.vocab_size, block=shape.block, draft_top_k=shape.draft_top_k)
    cases = {
        TRUNCATED: [make(NARROW, seed=seed) for seed in range(num_rounds)],
        FLAT: [make(NARROW, seed=seed, is_flat=True) for seed in range(num_rounds)],
        FULL: [make(WIDE, seed=seed) for seed in range(num_rounds)],
    }
    for name, feature_size in FEATURES.items():
        few = range(max(num_rounds // 10, 1))
        cases[name] = [make(NARROW, seed=seed, feature_size=feature_size) for seed in few]
    return cases


def messages(one: WireRound) -> dict[str, bytes]:
    """What one round sends, in order."""
    return {
        "draft_call": codec.encode_draft_call(one.draft_call),
        "draft_reply": codec.encode_draft_block(one.block),
        "verify_call": codec.encode_verify_call(one.verify_call),
        "verify_reply": codec.encode_target_rows(one.target, one.verify_call.proposals),
    }


@dataclass(frozen=True, slots=True)
class CaseBytes:
    """Medians per round."""

    bytes_per_round: float
    bytes_by_message: Mapping[str, float]
    gzip_bytes_per_round: float
    gzip_ms: float  # packing and unpacking all four messages
    codec_ms: float  # encoding and decoding all four messages, for comparison


def measure_bytes(rounds: Sequence[WireRound]) -> CaseBytes:
    """Encodes and packs every round, in this process."""
    sent = [messages(one) for one in rounds]
    packed, gzip_s, codec_s = [], [], []
    for one, parts in zip(rounds, sent, strict=True):
        started = perf_counter()
        zipped = [zlib.compress(part, GZIP_LEVEL) for part in parts.values()]
        for part in zipped:
            zlib.decompress(part)
        gzip_s.append(perf_counter() - started)
        packed.append(sum(map(len, zipped)))
        started = perf_counter()
        _decode(messages(one), one.verify_call)
        codec_s.append(perf_counter() - started)
    return CaseBytes(
        bytes_per_round=median(sum(map(len, parts.values())) for parts in sent),
        bytes_by_message={name: median(len(parts[name]) for parts in sent) for name in sent[0]},
        gzip_bytes_per_round=median(packed),
        gzip_ms=1e3 * median(gzip_s),
        codec_ms=1e3 * median(codec_s),
    )


def _decode(parts: Mapping[str, bytes], call: VerifyCall) -> None:
    codec.decode_draft_call(parts["draft_call"])
    codec.decode_draft_block(parts["draft_reply"])
    codec.decode_verify_call(parts["verify_call"])
    codec.decode_target_rows(parts["verify_reply"], call.proposals)


class PreparedDrafter:
    """A DrafterEngine that answers at once: with the block of the round that a call belongs to."""

    num_sessions = 0

    def __init__(self, shape: Shape, rounds: Sequence[WireRound]) -> None:
        features = rounds[0].draft_call.features
        self.info = DrafterInfo(
            "prepared", shape.vocab_size, 4096, shape.block, ("left_to_right",), False, True,
            feature_layers=() if features is None else (0,), feature_size=0 if features is None else features.shape[1],
        )  # fmt: skip
        self._blocks = {one.draft_call.prefix.session_id: one.block for one in rounds}

    def draft(self, call: DraftCall) -> DraftBlock:
        return self._blocks[call.prefix.session_id]

    def release(self, session_id: str) -> None:
        """Holds nothing."""


class PreparedVerifier:
    """A VerifierEngine that answers at once: with the rows of the round that a call belongs to."""

    num_sessions = 0

    def __init__(self, shape: Shape, rounds: Sequence[WireRound]) -> None:
        features = rounds[0].target.features
        self.info = VerifierInfo(
            "prepared", shape.vocab_size, 1 << 30, (), "float32",
            num_layers=0 if features is None else 1, hidden_size=0 if features is None else features.shape[1],
        )  # fmt: skip
        self._targets = {one.verify_call.prefix.session_id: one.target for one in rounds}

    def verify(self, call: VerifyCall) -> TargetRows:
        return self._targets[call.prefix.session_id]

    def resolve(self, call: ResolveCall) -> ResolvedToken:
        raise NotImplementedError("no rule of this measurement asks for it")

    def release(self, session_id: str) -> None:
        """Holds nothing."""
