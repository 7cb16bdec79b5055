"""A made-up pair: draft blocks and the verifier's rows for them, ready to be answered. No model stands behind them.

Nothing is kept of a session: what its calls state is believed, and both replicas tell which block a round is about from
its session and number alone.
"""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass

import numpy as np

from specdiff_dist.core.calibration import NUM_BINS
from specdiff_dist.core.rows import FloatArray, SparseRows
from specdiff_dist.core.sampling import draw_index
from specdiff_dist.types import (
    CallCost,
    DraftBlock,
    DraftCall,
    DrafterInfo,
    PrefixStatement,
    TargetRows,
    VerifierInfo,
    VerifyCall,
)

_SHARPNESS, _ERROR = 2.5, 1.0  # standard deviations: of the verifier's logits, and of the drafter's from them


@dataclass(frozen=True, slots=True)
class PairShape:
    """How large the replies are. The default is that of the embedded pair's, but for features."""

    vocab_size: int = 49_152
    support: int = 50  # entries of a proposal, and of a target row
    block: int = 8  # most tokens a draft call gives
    feature_layers: tuple[int, ...] = ()  # of a verifier with `num_layers` layers of `hidden_size`
    num_layers: int = 30
    hidden_size: int = 576
    num_blocks: int = 64  # different ones, used in turn


class SyntheticPair:
    """What the two replicas answer."""

    def __init__(self, shape: PairShape, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self._shape = shape
        self._rounds = [_make_round(shape, rng) for _ in range(shape.num_blocks)]
        self.drafter_info = DrafterInfo(
            "synthetic", shape.vocab_size, 1 << 20, shape.block, ("left_to_right",), is_deterministic=False,
            reports_true_proposals=True, feature_layers=shape.feature_layers, feature_size=self._feature_size,
            calibration=tuple(tuple(np.linspace(0.1, 0.9, NUM_BINS).tolist()) for _ in range(shape.block)),
        )  # fmt: skip
        self.verifier_info = VerifierInfo(
            "synthetic", shape.vocab_size, 1 << 20, (), "none", shape.num_layers, shape.hidden_size
        )

    @property
    def _feature_size(self) -> int:
        return len(self._shape.feature_layers) * self._shape.hidden_size

    def draft(self, call: DraftCall, forward_s: float) -> DraftBlock:
        """A block that took `forward_s` seconds."""
        block, _ = self._round(call.prefix)
        head = block.head(min(call.num_draft_tokens, block.num_tokens))
        return dataclasses.replace(head, cached_len=call.prefix.num_committed - 1, cost=CallCost(forward_s, 0.0, 1))

    def verify(self, call: VerifyCall, forward_s: float) -> TargetRows:
        """Rows for the first tokens of the round's block, whatever the call says they are."""
        _, rows = self._round(call.prefix)
        num_rows = len(call.draft_token_ids) + 1
        head = rows.head(num_rows)
        features = np.zeros((call.num_feature_rows, self._feature_size), np.float16) if call.feature_layers else None
        return TargetRows(
            head, head.row_sums(), None, None, call.prefix.num_committed + num_rows - 1, CallCost(forward_s, 0.0, 1),
            features,
        )  # fmt: skip

    def _round(self, prefix: PrefixStatement) -> tuple[DraftBlock, SparseRows]:
        return self._rounds[(zlib.crc32(prefix.session_id.encode()) + prefix.round_index) % len(self._rounds)]


def _make_round(shape: PairShape, rng: np.random.Generator) -> tuple[DraftBlock, SparseRows]:
    """Rows as top-k leaves them. A fifth of a proposal's tokens is not among the target's."""
    own = shape.support // 5
    target, proposed, token_ids, confidences = [], [], [], []
    for _ in range(shape.block + 1):
        ids = rng.choice(shape.vocab_size, shape.support + own, replace=False).astype(np.int32)
        logits = _SHARPNESS * rng.standard_normal(len(ids))
        guess = _softmax((logits + _ERROR * rng.standard_normal(len(ids)))[own:])
        drawn = draw_index(guess, rng.random())
        target.append((ids[: shape.support], _softmax(logits[: shape.support])))
        proposed.append((ids[own:], guess))
        token_ids.append(ids[own:][drawn])
        confidences.append((guess[drawn], guess.max()))
    block = DraftBlock(
        np.array(token_ids, np.int32),
        SparseRows.from_rows(proposed),
        np.array([of_token for of_token, _ in confidences], np.float32),
        np.array([most for _, most in confidences], np.float32),
        0,
    )
    return block.head(shape.block), SparseRows.from_rows(target)


def _softmax(logits: FloatArray) -> FloatArray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()
