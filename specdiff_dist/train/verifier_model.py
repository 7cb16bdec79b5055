"""The verifier as a plain transformers model, for batches instead of sessions."""

from __future__ import annotations

import inspect

import torch
from transformers import PreTrainedModel

from specdiff_dist.errors import InvalidConfig
from specdiff_dist.models import ModelFolder
from specdiff_dist.train.packed_linear import pack_linears
from specdiff_dist.verifiers.device import DTYPES
from specdiff_dist.verifiers.transformers_model import load_causal_lm

_LAYERS = {"full_attention", "sliding_attention"}


def load_model(
    folder: ModelFolder, *, dtype: str, device: torch.device, num_rows: int, longest: int
) -> PreTrainedModel:
    """Loads a verifier to write `num_rows` texts of up to `longest` tokens at once.

    Raises ModelUnavailable, and InvalidConfig on a model that does not see everything in such a text.
    """
    model = load_causal_lm(folder.path, DTYPES[dtype])
    check_model(model, longest)
    model.to(device).eval()
    pack_linears(model, num_rows)
    return model


def check_model(model: PreTrainedModel, longest: int) -> None:
    """Raises InvalidConfig on a model whose layers do not all attend to all of `longest` tokens."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    layer_types = set(getattr(config, "layer_types", None) or ())
    if not layer_types <= _LAYERS or "cache" not in inspect.signature(model.forward).parameters:
        raise InvalidConfig(f"{name} has layers other than attention; drafters are trained for attention models only")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < longest and (not layer_types or "sliding_attention" in layer_types):
        raise InvalidConfig(
            f"{name} sees {window} tokens in some layers; make prompts and answers shorter than that together"
        )
