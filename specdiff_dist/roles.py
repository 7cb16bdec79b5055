"""The two seams of the system.

`Drafter` and `Verifier` are what the round loop talks to: local, gRPC and leased replicas all answer to them, and one
contract test holds them to it. `DrafterEngine` and `VerifierEngine` are what stands behind: the synchronous model code
of one replica, called from one thread at a time.
"""

from __future__ import annotations

from typing import Protocol

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


class Drafter(Protocol):
    """Proposes draft blocks."""

    async def info(self) -> DrafterInfo:
        """Static facts. Raises DrafterUnavailable."""
        ...

    async def draft(self, call: DraftCall) -> DraftBlock:
        """Drafts after the anchor. Idempotent: the same call gives the same block.

        Raises PrefixMismatch (resend from its cached_len), StaleRound, DrafterUnavailable.
        """
        ...

    async def release(self, session_id: str) -> None:
        """Frees the session's cache; unknown ids are fine. Never raises."""
        ...


class Verifier(Protocol):
    """Judges draft blocks."""

    async def info(self) -> VerifierInfo:
        """Static facts. Raises VerifierUnavailable."""
        ...

    async def verify(self, call: VerifyCall) -> TargetRows:
        """Target rows after the anchor and after each draft token, in one forward. Idempotent.

        Raises PrefixMismatch (resend from its cached_len), StaleRound, InvalidRows, VerifierUnavailable.
        """
        ...

    async def resolve(self, call: ResolveCall) -> ResolvedToken:
        """One recovered token drawn from a wide row of the session's last verify call (rules whose residual depends on
        the rejected token). Raises PrefixMismatch(0) when that row is gone: verify again. VerifierUnavailable."""
        ...

    async def release(self, session_id: str) -> None:
        """Frees the session's cache; unknown ids are fine. Never raises."""
        ...


class DrafterEngine(Protocol):
    """One drafter replica's model. Not thread-safe: callers serialise."""

    @property
    def info(self) -> DrafterInfo: ...

    @property
    def num_sessions(self) -> int:
        """Sessions that hold cache right now."""
        ...

    def draft(self, call: DraftCall) -> DraftBlock: ...

    def release(self, session_id: str) -> None: ...


class VerifierEngine(Protocol):
    """One verifier replica's model. Not thread-safe: callers serialise."""

    @property
    def info(self) -> VerifierInfo: ...

    @property
    def num_sessions(self) -> int:
        """Sessions that hold cache right now."""
        ...

    def verify(self, call: VerifyCall) -> TargetRows: ...

    def resolve(self, call: ResolveCall) -> ResolvedToken: ...

    def release(self, session_id: str) -> None: ...
