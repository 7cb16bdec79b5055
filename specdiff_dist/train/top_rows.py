"""From logits to the most probable tokens, and to a drawn one, without sorting vocabularies."""

from __future__ import annotations

import torch
from torch import Tensor

TOP = 32
_CHUNK = 128


def top_logits(logits: Tensor, count: int = TOP) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of logits [n, V], descending, and their token ids (int64); both [n, count].

    They lie in the `count` chunks with the largest maxima, so only those are looked into: a tenth of the time of topk over
    a whole vocabulary on a CPU.
    """
    num_rows, vocab_size = logits.shape
    num_chunks = vocab_size // _CHUNK
    if num_chunks <= count:
        return torch.topk(logits, min(count, vocab_size), dim=-1)
    chunks = logits[:, : num_chunks * _CHUNK].unflatten(1, (num_chunks, _CHUNK))
    best = torch.topk(chunks.amax(dim=-1), count, dim=-1, sorted=False).indices  # [n, count]
    within = torch.arange(_CHUNK, device=logits.device)
    token_ids = (best[:, :, None] * _CHUNK + within).flatten(1)
    rest = torch.arange(num_chunks * _CHUNK, vocab_size, device=logits.device).expand(num_rows, -1)
    token_ids = torch.cat([token_ids, rest], dim=1)
    values, at = torch.topk(logits.gather(1, token_ids), count, dim=-1)
    return values, token_ids.gather(1, at)


def draw(logits: Tensor, tops: tuple[Tensor, Tensor], temperature: Tensor, top_p: Tensor, uniforms: Tensor) -> Tensor:
    """One token per row: temperature, then top-p, then the inverse CDF, the most probable tokens first.

    Args:
        logits: [n, V], and their `top_logits`.
        temperature, top_p, uniforms: float32 [n]; temperature > 0, uniforms in [0, 1).

    Returns token ids, int64 [n]. Whole rows are only looked at where the most probable tokens do not decide.
    """
    values, token_ids = tops
    scaled = logits / temperature[:, None]
    log_mass = torch.logsumexp(scaled, dim=-1, keepdim=True)
    probs = torch.exp(values / temperature[:, None] - log_mass)
    sums = probs.cumsum(dim=-1)
    is_kept = sums - probs < top_p[:, None]
    is_decided = sums[:, -1] >= top_p  # the nucleus lies within
    goal = uniforms * torch.where(is_decided, torch.where(is_kept, probs, 0.0).sum(dim=-1), 1.0)
    at = (sums <= goal[:, None]).sum(dim=-1)
    drawn = token_ids.gather(1, at.minimum(is_kept.sum(dim=-1) - 1)[:, None])[:, 0]
    is_whole = top_p >= 1.0
    rows = (~is_decided & is_whole & (at >= values.shape[1])).nonzero()[:, 0]
    if len(rows):
        beyond = (goal[rows] - sums[rows, -1]) / (1.0 - sums[rows, -1])
        drawn[rows] = _draw_beyond(scaled[rows], token_ids[rows], beyond)
    rows = (~is_decided & ~is_whole).nonzero()[:, 0]
    if len(rows):
        drawn[rows] = _draw_nucleus(scaled[rows], top_p[rows], uniforms[rows])
    return drawn


def _draw_beyond(scaled: Tensor, top_ids: Tensor, uniforms: Tensor) -> Tensor:
    """A token that is not among `top_ids`, by the inverse CDF over token order."""
    sums = torch.softmax(scaled, dim=-1).scatter(1, top_ids, 0.0).double().cumsum(dim=-1)
    mass = sums[:, -1:].contiguous()
    at = torch.searchsorted(sums, uniforms.double().clamp(0.0, 1.0)[:, None] * mass, right=True)
    last = torch.searchsorted(sums, mass)  # the last token with any mass, should rounding go beyond
    return at.minimum(last)[:, 0]


def _draw_nucleus(scaled: Tensor, top_p: Tensor, uniforms: Tensor) -> Tensor:
    probs, token_ids = torch.softmax(scaled, dim=-1).sort(dim=-1, descending=True)
    sums = probs.double().cumsum(dim=-1)
    sums = sums / sums[:, -1:]
    num_kept = (sums < top_p[:, None]).sum(dim=-1, keepdim=True).clamp(max=sums.shape[1] - 1) + 1
    goal = uniforms.double()[:, None] * sums.gather(1, num_kept - 1)
    at = (sums <= goal).sum(dim=-1, keepdim=True).minimum(num_kept - 1)
    return token_ids.gather(1, at)[:, 0]
