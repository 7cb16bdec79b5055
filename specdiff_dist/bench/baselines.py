"""What a user has without us: transformers' `generate`, plain and with prompt lookup.

torch and transformers by nature, as dense_torch.py: one of the places where they may be imported (tests/test_imports.py).
The model is loaded as a user would load it: its own class, this dtype, the default attention implementation.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from specdiff_dist.bench.speed import Answer, Task
from specdiff_dist.types import SamplingParams
from specdiff_dist.verifiers.device import pick_device
from specdiff_dist.verifiers.transformers_model import load_causal_lm

PROMPT_LOOKUP_NUM_TOKENS = 10


class TransformersModel:
    """A model folder in transformers' hands. EOS is ignored: every answer has the number of tokens asked for."""

    def __init__(self, folder: Path, *, dtype: str, device: str = "auto") -> None:
        """`dtype`: float32 or bfloat16. Raises ModelUnavailable."""
        model = load_causal_lm(folder, getattr(torch, dtype))
        self._model = model.to(pick_device(device)).eval()
        # The folder's own generation defaults would bring its EOS and sampling parameters back in.
        self._model.generation_config = GenerationConfig(pad_token_id=0)

    def contender(self, sampling: SamplingParams, num_tokens: int, *, prompt_lookup: bool) -> TransformersContender:
        """`generate` under these sampling parameters."""
        options: dict[str, Any] = {"max_new_tokens": num_tokens, "use_cache": True}
        if sampling.is_greedy:
            options["do_sample"] = False
        else:
            options |= {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
            }
        if prompt_lookup:
            options["prompt_lookup_num_tokens"] = PROMPT_LOOKUP_NUM_TOKENS
        return TransformersContender(self._model, options)


class TransformersContender:
    """One way of calling `generate`."""

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        self._model, self._options = model, options

    @torch.inference_mode()
    def __call__(self, task: Task) -> Answer:
        torch.manual_seed(task.seed)
        clock = _Clock()
        started = perf_counter()
        ids = torch.tensor([task.token_ids], device=self._model.device)
        output = self._model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **self._options)
        token_ids = tuple(output[0, len(task.token_ids) :].tolist())
        seconds = perf_counter() - started
        first_s = None if clock.first_at is None else clock.first_at - started
        return Answer(token_ids, seconds, first_s, clock.num_first)


class _Clock(BaseStreamer):
    """Notes when the first new tokens come; `generate` streams the prompt before them."""

    def __init__(self) -> None:
        self.first_at: float | None = None
        self.num_first = 0
        self._is_prompt_over = False

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt_over and self.first_at is None:
            self.first_at, self.num_first = perf_counter(), value.numel()
        self._is_prompt_over = True

    def end(self) -> None:
        pass


def num_threads() -> dict[str, int]:
    """Threads that torch computes with, in this thread and in a new one, as engines run in.

    The number belongs to the process, but OpenMP keeps it per thread and torch hands it on when a thread first computes.
    """
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        in_new_thread = pool.submit(torch.get_num_threads).result()
    return {
        "here": torch.get_num_threads(),
        "in_engine_thread": in_new_thread,
        "interop": torch.get_num_interop_threads(),
    }


def versions() -> dict[str, str]:
    """Of the packages that a time depends on."""
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}
