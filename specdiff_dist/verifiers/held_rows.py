"""The rows of a session's last wide verify call, kept for the one draw that may follow."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdiff_dist.core.rows import IntArray
from specdiff_dist.errors import InvalidRequest
from specdiff_dist.types import ResolveCall, ResolvedToken, VerifyCall
from specdiff_dist.verifiers.logits import process_logits, token_logprob
from specdiff_dist.verifiers.target_rows import draw_recovered


@dataclass(frozen=True, slots=True, eq=False)
class HeldRows:
    """What the call was answered from."""

    logits: Tensor  # float32 [d + 1, V], raw
    call: VerifyCall
    token_ids: IntArray  # the call's committed and draft tokens

    @property
    def round_index(self) -> int:
        return self.call.prefix.round_index

    def resolve(self, resolve: ResolveCall) -> ResolvedToken:
        """The recovered token, and its logprob if the verify call asked for them. Raises InvalidRequest."""
        if resolve.position >= len(self.logits):
            raise InvalidRequest(f"position must be below {len(self.logits)}, not {resolve.position}")
        row = process_logits(self.logits, self.call, self.token_ids)[resolve.position]
        token_id = draw_recovered(row, self.call.sampling, resolve.proposal, resolve.scale, resolve.uniform)
        if self.call.num_logprobs is None:
            return ResolvedToken(token_id)
        return ResolvedToken(token_id, logprob=token_logprob(self.logits[resolve.position], token_id))
