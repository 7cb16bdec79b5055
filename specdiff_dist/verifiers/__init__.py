"""Verifiers: the models whose law is the target. Imports torch only when one is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdiff_dist.roles import VerifierEngine

if TYPE_CHECKING:
    from specdiff_dist.verifiers.causal_lm import ModelForward


def load_verifier(
    model: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    num_threads: int | None = None,
    max_model_len: int | None = None,
    max_sessions: int = 64,
    max_shared_tokens: int | None = None,
) -> VerifierEngine:
    """Loads a verifier by model name (see `models.resolve`).

    Args:
        dtype: float32, bfloat16, int4 (weights that are 4-bit blocks, on a CPU), or auto: int4 where it can be, else
            bfloat16.
        device: a torch device, or auto: CUDA where there is one.
        num_threads: CPU threads of the whole process; None leaves them alone.
        max_model_len: context limit below the model's own.
        max_sessions: sessions that keep their KV cache; the least recently used is dropped above it.
        max_shared_tokens: of ended sessions' prompts, kept for prompts beginning alike; 0: every prompt is read whole.

    Raises ModelUnavailable, InvalidConfig.
    """
    from specdiff_dist.models import resolve
    from specdiff_dist.verifiers.causal_lm import CausalLMVerifier

    folder = resolve(model)
    forward = load_forward(folder.path, dtype, device, num_threads=num_threads)
    forward.max_model_len = min(forward.max_model_len, folder.max_model_len)
    return CausalLMVerifier(
        forward,
        name=folder.name,
        eos_token_ids=folder.eos_token_ids,
        max_model_len=max_model_len,
        max_sessions=max_sessions,
        **({} if max_shared_tokens is None else {"max_shared_tokens": max_shared_tokens}),
    )


def load_forward(folder: Path, dtype: str, device: str, *, num_threads: int | None = None) -> ModelForward[Any]:
    """Our own forward pass where it can run the model in `folder`, else transformers'. Raises as `load_verifier`."""
    import torch

    from specdiff_dist.verifiers.folder import read_config
    from specdiff_dist.verifiers.llama_forward import LlamaForward, plain_llama
    from specdiff_dist.verifiers.transformers_forward import TransformersForward

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    shape = plain_llama(read_config(folder))
    if shape is not None:
        return LlamaForward.load(folder, shape, dtype=dtype, device=device)
    return TransformersForward.load(folder, dtype=dtype, device=device)


__all__ = ["load_forward", "load_verifier"]
