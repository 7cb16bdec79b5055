"""Drafters: what proposes blocks. Imports torch only when a model is loaded."""

from __future__ import annotations

from pathlib import Path

from specdiff_dist.drafters.combined import CombinedDrafter
from specdiff_dist.drafters.draft_choice import BLOCK_DRAFT_COST, BLOCK_TOKEN_COST, DRAFT_COST, TOKEN_COST
from specdiff_dist.errors import InvalidConfig
from specdiff_dist.roles import Drafter, DrafterEngine
from specdiff_dist.types import VerifierInfo

WEIGHTS = Path(__file__).parent / "weights"
EMBEDDED_DRAFTERS = {"diffusion": WEIGHTS / "smollm2-135m"}
LOOKUP = "prompt-lookup"
COMBINED = "combined"  # short for diffusion+prompt-lookup
BLOCK_DTYPE = "int4"  # of a verifier that runs on our CPU kernels


def split_name(name: str) -> tuple[str, bool]:
    """What `load_drafter` is to load for a drafter's name, and whether the caller copies beside it (drafters/combined.py):
    `combined`, that is `diffusion+prompt-lookup`, or `FOLDER+prompt-lookup`: whichever pays, round by round."""
    name = f"diffusion+{LOOKUP}" if name == COMBINED else name
    return name.removesuffix(f"+{LOOKUP}"), name.endswith(f"+{LOOKUP}")


def with_copying(drafter: Drafter, verifier: VerifierInfo, *, max_sessions: int = 64) -> CombinedDrafter:
    """The CombinedDrafter around `drafter`, with what its drafts cost beside a verification by `verifier`."""
    costs = (BLOCK_DRAFT_COST, BLOCK_TOKEN_COST) if verifier.dtype == BLOCK_DTYPE else (DRAFT_COST, TOKEN_COST)
    return CombinedDrafter(drafter, max_sessions=max_sessions, draft_cost=costs[0], token_cost=costs[1])


def load_drafter(
    name: str,
    *,
    verifier: str,
    dtype: str = "auto",
    device: str = "auto",
    num_threads: int | None = None,
    max_sessions: int = 64,
) -> DrafterEngine:
    """Loads a drafter for a verifier (a model name, see `models.resolve`).

    Args:
        name: `diffusion` (the weights shipped for smollm2-135m), `prompt-lookup`, or a folder of the same format. Of names
            that combine (`split_name`) only the first part has an engine.
        dtype: float32, bfloat16, int8 (CPU) or auto: the fastest here.
        device: a torch device, or auto: CUDA where there is one.
        num_threads: CPU threads of the whole process; None leaves them alone.
        max_sessions: sessions that keep their cache; the least recently used is dropped above it.

    Raises InvalidConfig for an unknown name or a verifier that the weights were not trained for, ModelUnavailable.
    """
    from specdiff_dist.models import resolve

    is_lookup = name == LOOKUP
    folder = EMBEDDED_DRAFTERS.get(name, Path(name))
    if not is_lookup and not (folder / "config.json").is_file():
        raise InvalidConfig(
            f"unknown drafter {name!r}: use {', '.join(EMBEDDED_DRAFTERS)}, {LOOKUP}, {COMBINED}, or a folder with "
            f"config.json and a safetensors file (+{LOOKUP} combines it)"
        )
    model = resolve(verifier)
    if is_lookup:
        from specdiff_dist.drafters.prompt_lookup import PromptLookupDrafter
        from specdiff_dist.verifiers.folder import vocab_size

        return PromptLookupDrafter(
            vocab_size=vocab_size(model.path), max_model_len=model.max_model_len, max_sessions=max_sessions
        )

    import torch

    from specdiff_dist.drafters.block_diffusion import BlockDiffusionDrafter

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    return BlockDiffusionDrafter.load(
        folder, name=name, verifier_folder=model.path, dtype=dtype, device=device, max_sessions=max_sessions
    )


__all__ = ["COMBINED", "EMBEDDED_DRAFTERS", "LOOKUP", "load_drafter", "split_name", "with_copying"]
