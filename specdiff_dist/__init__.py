"""Speculative diffusion decoding: a diffusion model drafts a block, an autoregressive model verifies it.

    from specdiff_dist import load_pair

    with load_pair("smollm2-135m") as pair:
        print(pair.generate("Why is the sky blue?", tier="fast", max_tokens=64).text)

The package knows nothing of Ray or HTTP; those live in `deployments/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdiff_dist.api import Completion, Pair, load_pair
    from specdiff_dist.config import DecodeConfig
    from specdiff_dist.errors import SpecdiffError
    from specdiff_dist.types import GenerateRequest, Receipt, SamplingParams, TokenChunk

# Imported on first use: a replica that needs only core/ must not pay for, or depend on, the rest.
_HOMES = {
    "Completion": "specdiff_dist.api",
    "DecodeConfig": "specdiff_dist.config",
    "GenerateRequest": "specdiff_dist.types",
    "Pair": "specdiff_dist.api",
    "Receipt": "specdiff_dist.types",
    "SamplingParams": "specdiff_dist.types",
    "SpecdiffError": "specdiff_dist.errors",
    "TokenChunk": "specdiff_dist.types",
    "load_pair": "specdiff_dist.api",
}

__all__ = [
    "Completion",
    "DecodeConfig",
    "GenerateRequest",
    "Pair",
    "Receipt",
    "SamplingParams",
    "SpecdiffError",
    "TokenChunk",
    "load_pair",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
