"""From the verifier's logits to the rows that are sent: the request's sampling parameters, then narrow or wide."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from specdiff_dist.core import sampling as sampling_core
from specdiff_dist.core.rows import IntArray, SparseRows
from specdiff_dist.errors import InvalidRequest, InvalidRows
from specdiff_dist.types import MAX_NARROW_SUPPORT, CallCost, SamplingParams, TargetRows, VerifyCall
from specdiff_dist.verifiers.logits import process_logits, read_logprobs
from specdiff_dist.verifiers.wide_draws import draw_wide

_KEY_SHIFT = 17  # of a float32's bits: exponent and 6 bits of the fraction are left
_NUM_KEYS = 8192  # a probability of 1 has key 8128


@dataclass(frozen=True, slots=True, eq=False)
class _Entries:
    """Truncated rows as a flat list of their entries, on the logits' device, rows and token ids ascending."""

    row_index: Tensor  # int64 [nnz]
    token_ids: Tensor  # int64 [nnz]
    probs: Tensor  # float32 [nnz]

    def counts(self, num_rows: int) -> Tensor:
        return torch.bincount(self.row_index, minlength=num_rows)

    def row_sums(self, num_rows: int) -> Tensor:
        zeros = torch.zeros(num_rows, dtype=torch.float64, device=self.probs.device)
        return zeros.index_add_(0, self.row_index, self.probs.double())

    def normalised(self, num_rows: int) -> _Entries:
        probs = self.probs / self.row_sums(num_rows).index_select(0, self.row_index)
        return _Entries(self.row_index, self.token_ids, probs.float())

    def keep(self, mask: Tensor) -> _Entries:
        at = torch.nonzero(mask).flatten()
        return _Entries(*(field.index_select(0, at) for field in (self.row_index, self.token_ids, self.probs)))


def target_rows(
    logits: Tensor,
    call: VerifyCall,
    *,
    cached_len: int,
    token_ids: IntArray | None = None,
    cost: CallCost | None = None,
    narrow: SparseRows | None = None,
) -> TargetRows:
    """The target's law at d + 1 positions, in float32: `call.processing`, if any, then `call.sampling`: temperature, then
    min-p, then top-k, then top-p. With logprobs of the raw logits if the call asks for them.

    Top-k keeps every token tied with the k-th; top-p keeps the smallest set of most probable tokens whose probability
    (after top-k) reaches top_p, of equal ones those with lower ids; both as the transformers warpers do. Greedy rows are
    one-hot at the first largest logit. A row is narrow when at most MAX_NARROW_SUPPORT tokens are left; untruncated rows
    of a larger vocabulary are always wide.

    Args:
        logits: float32 [d + 1, V] on any device; -inf forbids a token. Only small results leave the device.
        call: its `proposals` and `target_uniforms` are used for wide rows only.
        token_ids: committed and draft tokens of the call; only penalties look at them.
        narrow: the law, where narrow_rows.py has made it already (and found nothing broken).

    Raises InvalidRows when a row has a NaN, +inf or nothing but -inf (no token is ever made up from it), InvalidRequest
    when rows are wide and the proposals that wide replies need are missing or do not fit.
    """
    if narrow is not None:
        target = TargetRows(narrow, narrow.row_sums(), None, None, cached_len, cost or CallCost())
    else:
        _check_finite(logits)
        processed = process_logits(logits, call, token_ids)
        if processed is not logits:
            _check_finite(processed, "the logits after the request's processing")
        target = _law(processed, call, cached_len, cost or CallCost())
    if call.num_logprobs is None:
        return target
    return replace(target, logprobs=read_logprobs(logits, target, call))


def _law(logits: Tensor, call: VerifyCall, cached_len: int, cost: CallCost) -> TargetRows:
    num_rows, vocab_size = logits.shape
    sampling = call.sampling
    if sampling.is_greedy:
        best = torch.argmax(logits, dim=-1).cpu().numpy()
        return TargetRows(SparseRows.one_hot(best), np.ones(num_rows), None, None, cached_len, cost)

    scaled = _scaled(logits, sampling)
    if 0 < sampling.top_k < vocab_size:
        entries = _top_k(scaled, sampling.top_k)
        mass = entries.row_sums(num_rows)
    else:
        dense = torch.softmax(scaled, dim=-1)
        if sampling.top_p >= 1.0 and vocab_size > MAX_NARROW_SUPPORT:
            return _wide(dense, call, cached_len, cost)
        entries = _likely(dense, sampling.top_p)
        mass = dense.sum(dim=-1, dtype=torch.float64)
    if sampling.top_p < 1.0:
        entries = _top_p(entries, mass, sampling.top_p)

    if int(entries.counts(num_rows).max()) <= MAX_NARROW_SUPPORT:
        rows = _to_sparse(entries, num_rows)
        return TargetRows(rows, rows.row_sums(), None, None, cached_len, cost)
    dense = torch.zeros_like(scaled)
    dense[entries.row_index, entries.token_ids] = entries.probs
    return _wide(dense, call, cached_len, cost)


def draw_recovered(logits: Tensor, sampling: SamplingParams, proposal: SparseRows, scale: float, uniform: float) -> int:
    """The token drawn from norm([scale·p - q]+) of one row by inverse CDF over token order (core.acceptance.residual).

    Args:
        logits: float32 [V], processed, not greedy; proposal: one row, q.
    """
    dense = _dense(_scaled(logits[None], sampling), sampling)[0]
    target = dense.double() / dense.sum(dtype=torch.float64)
    ids = torch.from_numpy(proposal.token_ids).long().to(dense.device)
    weights = scale * target
    weights[ids] -= torch.from_numpy(proposal.normalised()).to(dense.device)
    weights.clamp_(min=0.0)
    if float(weights.sum()) <= 0.0:
        weights = target
    return sampling_core.draw_index(weights.cpu().numpy(), uniform)


def _scaled(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """After temperature and min-p."""
    scaled = logits if sampling.temperature == 1.0 else logits / sampling.temperature
    if sampling.min_p > 0.0:
        scaled = scaled.masked_fill(scaled < scaled.amax(dim=-1, keepdim=True) + math.log(sampling.min_p), -torch.inf)
    return scaled


def _dense(scaled: Tensor, sampling: SamplingParams) -> Tensor:
    """Whole truncated rows, float32 [n, V]."""
    if 0 < sampling.top_k < scaled.shape[-1]:
        entries = _top_k(scaled, sampling.top_k)
        mass = entries.row_sums(len(scaled))
    else:
        dense = torch.softmax(scaled, dim=-1)
        if sampling.top_p >= 1.0:
            return dense
        entries, mass = _likely(dense, sampling.top_p), dense.sum(dim=-1, dtype=torch.float64)
    if sampling.top_p < 1.0:
        entries = _top_p(entries, mass, sampling.top_p)
    rows = torch.zeros_like(scaled)
    rows[entries.row_index, entries.token_ids] = entries.probs
    return rows


def _wide(dense: Tensor, call: VerifyCall, cached_len: int, cost: CallCost) -> TargetRows:
    proposals = _proposals_for_wide(call, *dense.shape)
    wide = draw_wide(dense, proposals, call.target_uniforms)
    on_support = SparseRows(proposals.row_splits, proposals.token_ids, wide.on_support)
    return TargetRows(on_support, wide.row_mass, wide.recovered_token_ids, wide.plain_token_ids, cached_len, cost)


def _check_finite(logits: Tensor, what: str = "the verifier's logits") -> None:
    largest = logits.amax(dim=-1)  # NaN wins over everything
    bad = torch.nonzero(~torch.isfinite(largest)).flatten()
    if len(bad):
        raise InvalidRows(
            f"{what} at {len(bad)} of {len(largest)} positions are NaN, +inf or all -inf; the model or "
            "its dtype is broken (try dtype float32)"
        )


def _top_k(scaled: Tensor, top_k: int) -> _Entries:
    kth = torch.topk(scaled, top_k, dim=-1).values[:, -1:]
    row_index, token_ids = torch.nonzero((scaled >= kth) & (scaled > -torch.inf), as_tuple=True)
    largest = scaled.amax(dim=-1)
    weights = torch.exp(scaled[row_index, token_ids] - largest[row_index])
    return _Entries(row_index, token_ids, weights).keep(weights > 0).normalised(len(scaled))


def _likely(dense: Tensor, top_p: float) -> _Entries:
    """Entries that top-p may keep (all positive ones at top_p = 1). Tokens below (1 - top_p) / V each add up to less
    than 1 - top_p, so top-p drops them all; leaving them out saves sorting whole rows. Half of it, for rounding."""
    vocab_size = dense.shape[-1]
    at = torch.nonzero(dense.flatten() > 0.5 * (1.0 - top_p) / vocab_size).flatten()
    return _Entries(at // vocab_size, at % vocab_size, dense.flatten().index_select(0, at))


def _top_p(entries: _Entries, mass: Tensor, top_p: float) -> _Entries:
    """Keeps a token when the more probable ones before it hold less than top_p of the row's mass (float64 [n]).

    A row may have tens of thousands of entries, so they are not sorted but added up by the leading bits of their
    probability; only those that share these bits with the last kept one are put in order.
    """
    row_index, probs, goal = entries.row_index, entries.probs.double(), top_p * mass
    keys = entries.probs.view(torch.int32).long() >> _KEY_SHIFT  # ascending with the probability, which is positive
    by_key = torch.bincount(row_index * _NUM_KEYS + keys, weights=probs, minlength=len(mass) * _NUM_KEYS)
    by_key = by_key.view(len(mass), _NUM_KEYS)
    above = by_key.flip(-1).cumsum(-1).flip(-1) - by_key  # [n, keys] mass of all larger keys, falling with the key
    last_key = (above < goal[:, None]).int().argmax(dim=-1)  # the smallest of those that hold a kept token

    last_of_row = last_key.index_select(0, row_index)
    kept = keys > last_of_row
    tied = torch.nonzero(keys == last_of_row).flatten()
    tied = tied[torch.argsort(probs[tied], descending=True, stable=True)]
    tied = tied[torch.argsort(row_index[tied], stable=True)]  # now by row, then probability, then token id
    rows, tied_probs = row_index[tied], probs[tied]
    before = torch.cumsum(tied_probs, 0) - tied_probs
    before = before - before[torch.searchsorted(rows, rows)] + above[rows, last_key[rows]]
    kept[tied] = before < goal[rows]
    return entries.keep(kept).normalised(len(mass))


def _to_sparse(entries: _Entries, num_rows: int) -> SparseRows:
    splits = np.zeros(num_rows + 1, np.int64)
    np.cumsum(entries.counts(num_rows).cpu().numpy(), out=splits[1:])
    return SparseRows(splits, entries.token_ids.to(torch.int32).cpu().numpy(), entries.probs.cpu().numpy())


def _proposals_for_wide(call: VerifyCall, num_rows: int, vocab_size: int) -> SparseRows:
    num_draft = num_rows - 1
    proposals = call.proposals
    if proposals is None and num_draft == 0:
        proposals = SparseRows.from_rows([])
    if proposals is None or proposals.num_rows != num_draft:
        given = "none" if proposals is None else str(proposals.num_rows)
        raise InvalidRequest(
            f"the target's rows are wide (more than {MAX_NARROW_SUPPORT} tokens) and need one proposal for each of the "
            f"{num_draft} draft tokens; the call brought {given}",
            param="proposals",
        )
    if len(call.target_uniforms) != num_rows:
        raise InvalidRequest(
            f"{num_draft} draft tokens need {num_rows} target uniforms, not {len(call.target_uniforms)}",
            param="target_uniforms",
        )
    if num_draft:
        proposals.check(vocab_size=vocab_size, what="proposal")
    return proposals
