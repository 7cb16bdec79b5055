"""Resolving one wide row: the token that core.acceptance would have drawn from the whole row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from specdiff_dist.core import sampling as core_sampling
from specdiff_dist.core.acceptance import residual
from specdiff_dist.core.rows import SparseRows
from specdiff_dist.errors import PrefixMismatch
from specdiff_dist.types import PrefixStatement, ResolveCall, SamplingParams, VerifyCall, prefix_crc
from specdiff_dist.verifiers.causal_lm import CausalLMVerifier
from specdiff_dist.verifiers.forward import Forwarded, ForwardPart
from specdiff_dist.verifiers.target_rows import draw_recovered, target_rows


@pytest.mark.parametrize(
    "params", [SamplingParams(1.0), SamplingParams(0.7, top_p=0.99), SamplingParams(1.3, top_k=300)]
)
def test_draws_what_the_whole_row_would_give(params: SamplingParams) -> None:
    rng = np.random.default_rng(0)
    vocab = 600
    for trial in range(50):
        logits = torch.from_numpy(rng.standard_normal((2, vocab)).astype(np.float32))
        ids = np.sort(rng.choice(vocab, 12, replace=False)).astype(np.int32)
        proposal = SparseRows.from_rows([(ids, rng.dirichlet(np.ones(12)).astype(np.float32))])
        prefix = PrefixStatement("s", 0, 0, prefix_crc(np.zeros(0, np.int32)), np.array([1], np.int32))
        call = VerifyCall(prefix, ids[:1], params, proposal, np.array([0.3, 0.6]))
        wide = target_rows(logits.clone(), call, cached_len=2)
        assert wide.is_wide
        # The whole law from the plain definition of the sampling parameters, through its own narrow path.
        scaled = logits[0].double() / params.temperature
        if params.top_k:
            scaled[scaled < torch.topk(scaled, params.top_k).values[-1]] = -torch.inf
        law = torch.softmax(scaled, -1).numpy()
        if params.top_p < 1.0:
            order = np.argsort(-law, kind="stable")
            law[order[np.cumsum(law[order]) - law[order] >= params.top_p]] = 0.0
            law /= law.sum()
        everything = np.arange(vocab, dtype=np.int32)
        for scale in (1.0, 0.6, 0.05):
            uniform = float(rng.random())
            left = residual(everything, law, ids, proposal.normalised(), scale)
            want = core_sampling.draw_index(left, uniform)
            assert draw_recovered(logits[0], params, proposal, scale, uniform) == want, trial


class Counting:
    """A ModelForward whose logits depend on the number of tokens."""

    vocab_size, max_model_len, dtype, device_type = 400, 64, "float32", "cpu"
    num_layers, hidden_size, kv_bytes_per_token = 0, 0, 4

    def new_cache(self) -> list[int]:
        return []

    def crop(self, cache: list[int], length: int) -> None:
        del cache[length:]

    def copy_cache(self, cache: list[int], length: int) -> list[int]:
        return cache[:length]

    def forward_parts(self, parts: Sequence[ForwardPart[list[int]]]) -> list[Forwarded]:
        return [self._forward(part) for part in parts]

    def _forward(self, part: ForwardPart[list[int]]) -> Forwarded:
        part.cache.extend(part.token_ids.tolist())
        generator = torch.Generator().manual_seed(len(part.cache))
        return Forwarded(torch.randn(part.num_logits, self.vocab_size, generator=generator), None)


def test_rows_are_held_until_the_next_call_only() -> None:
    engine = CausalLMVerifier(Counting(), name="counting")
    none = np.zeros(0, np.int32)
    proposal = SparseRows.one_hot([5])
    uniforms = np.array([0.5, 0.5])

    def verify(round_index: int, *, hold: bool) -> None:
        prefix = PrefixStatement("s", round_index, 0, prefix_crc(none), np.array([1, 2], np.int32))
        engine.verify(VerifyCall(prefix, np.array([5], np.int32), SamplingParams(1.0), proposal, uniforms, hold))

    resolve = ResolveCall("s", 0, 0, 0.5, 0.25, proposal)
    with pytest.raises(PrefixMismatch):
        engine.resolve(resolve)  # unknown session
    verify(0, hold=True)
    token = engine.resolve(resolve).token_id
    assert engine.resolve(resolve).token_id == token != 5
    verify(1, hold=False)
    with pytest.raises(PrefixMismatch):
        engine.resolve(resolve)
    verify(2, hold=True)
    with pytest.raises(PrefixMismatch):
        engine.resolve(resolve)  # another round's row
    engine.release("s")
    assert engine.num_sessions == 0
