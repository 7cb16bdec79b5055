"""A model folder in transformers' hands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from specdiff_dist.errors import ModelUnavailable


def load_causal_lm(folder: Path, dtype: torch.dtype) -> Any:
    """The causal language model in `folder` (a PreTrainedModel), on the CPU. Never fetches, never runs the folder's code.

    Raises ModelUnavailable when it cannot be read or lacks tensors, which transformers would fill with random numbers.
    """
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelUnavailable(f"cannot load the verifier from {folder} with transformers: {error}") from error
    model, report = loaded
    if report["missing_keys"]:
        names = ", ".join(sorted(report["missing_keys"])[:3])
        raise ModelUnavailable(f"the weights in {folder} lack {names}; fetch the folder again")
    return model
