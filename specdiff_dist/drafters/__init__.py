"""Drafters: what proposes blocks. Imports torch only when a model is loaded."""

from __future__ import annotations

from pathlib import Path

from specdiff_dist.errors import InvalidConfig
from specdiff_dist.roles import DrafterEngine

WEIGHTS = Path(__file__).parent / "weights"
EMBEDDED_DRAFTERS = {"diffusion": WEIGHTS / "smollm2-135m"}


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
        name: `diffusion` (the weights shipped for smollm2-135m), `prompt-lookup`, or a folder of the same format.
        dtype: float32, bfloat16, int8 (CPU) or auto: the fastest here.
        device: a torch device, or auto: CUDA where there is one.
        num_threads: CPU threads of the whole process; None leaves them alone.
        max_sessions: sessions that keep their cache; the least recently used is dropped above it.

    Raises InvalidConfig for an unknown name or a verifier that the weights were not trained for, ModelUnavailable.
    """
    from specdiff_dist.models import resolve

    is_lookup = name == "prompt-lookup"
    folder = EMBEDDED_DRAFTERS.get(name, Path(name))
    if not is_lookup and not (folder / "config.json").is_file():
        raise InvalidConfig(
            f"unknown drafter {name!r}: use {', '.join(EMBEDDED_DRAFTERS)}, prompt-lookup, or a folder with config.json "
            "and a safetensors file"
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


__all__ = ["EMBEDDED_DRAFTERS", "load_drafter"]
