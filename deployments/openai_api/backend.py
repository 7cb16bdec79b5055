"""What the HTTP layer talks to: the router, or a fake in tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any, Protocol

from specdiff_dist.config import DecodeConfig
from specdiff_dist.types import DrafterInfo, GenerateRequest, SamplingParams, TokenChunk


class PromptTokenizer(Protocol):
    """The part of specdiff_dist.text.Tokenizer that turns prompts into ids."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model behind the endpoint, as this process knows it without asking the router."""

    name: str
    tokenizer: PromptTokenizer
    default_sampling: SamplingParams  # for what the client leaves out
    has_chat_template: bool
    tiers: Mapping[str, DecodeConfig]
    default_tier: str
    created: int = field(default_factory=lambda: int(time()))  # Unix seconds


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """What the router says about itself."""

    max_model_len: int  # prompt and answer together, in tokens
    vocab_size: int  # the verifier's
    drafter: DrafterInfo | None  # None: off, or not reachable at the moment


class Backend(Protocol):
    """Decodes requests."""

    async def info(self) -> ServiceInfo:
        """Raises VerifierUnavailable (or an ApiError) when nothing can be served at the moment."""
        ...

    def generate(
        self, request: GenerateRequest, config: DecodeConfig | None, tier: str
    ) -> AsyncGenerator[TokenChunk, None]:
        """Chunks of one answer; closing the generator frees the request's sessions.

        `config` None: the tier's own, chosen by the backend. Raises the errors of specdiff_dist.errors; InvalidRequest
        only before the first chunk.
        """
        ...


class RecentInfo:
    """`Backend.info` for requests: at most `max_age_s` old, so that a request costs no extra round trip."""

    def __init__(self, backend: Backend, *, max_age_s: float = 2.0) -> None:
        self._backend = backend
        self._max_age_s = max_age_s
        self._info: ServiceInfo | None = None
        self._asked_at = 0.0

    async def get(self) -> ServiceInfo:
        """Raises what `info` raises; nothing stale is served then."""
        now = monotonic()
        info = self._info
        if info is None or now - self._asked_at > self._max_age_s:
            info = await self._backend.info()
            self._info, self._asked_at = info, now
        return info
