"""How many tokens a replica's sessions may cache together."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from deployments.reservations import STEP, Reservations
from specdiff_dist.errors import InvalidConfig
from specdiff_dist.roles import DrafterEngine, VerifierEngine

GROWTH = 1.5  # caches grow by half at a time: so much more than its tokens may one take

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVSpace:
    """`tokens` of all sessions, or what fits into `share` of the memory that is free when the model is loaded."""

    tokens: int | None = None
    share: float = 0.4
    kept_tokens: int = 0  # of ended sessions' prompts, on top
    step: int = STEP  # tokens of an answer that are reserved at a time

    def reservations(self, engine: DrafterEngine | VerifierEngine) -> Reservations:
        """For an engine's sessions. Raises InvalidConfig as `num_tokens` does."""
        return Reservations(self.num_tokens(engine), step=self.step)

    def num_tokens(self, engine: DrafterEngine | VerifierEngine) -> int | None:
        """For an engine; None, no limit, for one that does not say what a token takes. Raises InvalidConfig when there is no
        room at all."""
        if self.tokens is not None:
            return self.tokens
        caches: Any = engine
        per_token = GROWTH * getattr(caches, "kv_bytes_per_token", 0)
        if not per_token:
            return None
        from specdiff_dist.verifiers.device import free_memory  # torch is the model's process' alone

        free = free_memory(caches.device_type)
        num_tokens = max(int(self.share * free / per_token) - self.kept_tokens, 0)
        if not num_tokens:
            raise InvalidConfig(
                f"{free / 2**30:.1f} GiB free leave no room for sessions; free some, or set kv_cache_tokens"
            )
        log.info("room for the KV of %d tokens: %.0f %% of %.1f GiB free", num_tokens, 100 * self.share, free / 2**30)
        return num_tokens
