"""Every error the package raises on purpose, as one tree. Each message says what to do next.

SpecdiffError
├── InvalidRequest              the caller's request cannot be served as asked       (HTTP 400)
├── InvalidConfig               a deployment setting or DecodeConfig is wrong        (start-up; HTTP 400 in `quality`)
│   └── InexactConfig           the exact tier was asked to break its promise; names the trap
├── ModelUnavailable            weights or tokenizer cannot be fetched, read or converted
└── RoleError                   a drafter or verifier call failed
    ├── PrefixMismatch          the replica caches less than the caller believed: resend from `cached_len`
    ├── StaleRound              a delayed duplicate of an older round arrived; its answer is of no use
    ├── InvalidRows             a reply carries NaN/Inf, negative or missing probabilities  (HTTP 500)
    ├── DrafterUnavailable      no drafter right now: decode plainly, try again next round
    └── VerifierUnavailable     no verifier could be leased in time                   (HTTP 503)
"""

from __future__ import annotations


class SpecdiffError(Exception):
    """Base of all errors raised on purpose."""


class InvalidRequest(SpecdiffError):
    """The request is malformed or cannot be served. `param` is the JSON path of the offending field."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidConfig(SpecdiffError):
    """A configuration value is out of range or contradicts another."""


class InexactConfig(InvalidConfig):
    """A configuration that cannot keep the exact tier's promise. `trap` is 1, 2 or 3 (README, "Exact means exact")."""

    def __init__(self, message: str, *, trap: int) -> None:
        super().__init__(message)
        self.trap = trap


class ModelUnavailable(SpecdiffError):
    """A model's files cannot be fetched, read or converted."""


class RoleError(SpecdiffError):
    """A call to a drafter or verifier replica failed."""


class PrefixMismatch(RoleError):
    """The replica holds only `cached_len` tokens of the stated prefix; call again with prefix_len = cached_len."""

    def __init__(self, cached_len: int) -> None:
        super().__init__(f"the replica has {cached_len} tokens of this session; resend from there")
        self.cached_len = cached_len


class StaleRound(RoleError):
    """The replica has already seen a later round of this session."""


class InvalidRows(RoleError):
    """A probability row is not a distribution; no token is ever made up from it."""


class DrafterUnavailable(RoleError):
    """No drafter answers at the moment."""


class VerifierUnavailable(RoleError):
    """No verifier answers, and none could be leased within the deadline."""
