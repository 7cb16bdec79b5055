"""What a user of a CPU would pick instead: llama.cpp, by llama-cpp-python (an optional dependency of this benchmark)."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

from specdiff_dist.bench.speed import Answer, Task
from specdiff_dist.errors import InvalidConfig
from specdiff_dist.types import SamplingParams


class LlamaCppContender:
    """A GGUF file in llama.cpp's hands. EOS is ignored: every answer has the number of tokens asked for."""

    def __init__(
        self, path: Path, sampling: SamplingParams, num_tokens: int, *, context: int, num_threads: int
    ) -> None:
        """`context`: tokens of the longest prompt and its answer. Raises InvalidConfig when it cannot be loaded."""
        try:
            import llama_cpp  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise InvalidConfig("--llama-cpp needs llama-cpp-python: pip install llama-cpp-python") from error
        try:
            self._llama: Any = vars(llama_cpp)["Llama"](
                str(path), n_ctx=context, n_threads=num_threads, n_threads_batch=num_threads, verbose=False
            )
        except (ValueError, OSError) as error:
            raise InvalidConfig(f"--llama-cpp: {path} cannot be loaded: {error}") from error
        self._num_tokens = num_tokens
        self._options: dict[str, Any] = {"temp": 0.0, "repeat_penalty": 1.0, "min_p": 0.0}
        if not sampling.is_greedy:
            self._options |= {"temp": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}

    def __call__(self, task: Task) -> Answer:
        self._llama.set_seed(task.seed % 2**32)
        self._llama.reset()  # reads the whole prompt, as ours does
        self._llama.n_tokens = 0
        token_ids, first_s = [], None
        started = perf_counter()
        for token_id in islice(
            self._llama.generate(list(task.token_ids), reset=False, **self._options), self._num_tokens
        ):
            if first_s is None:
                first_s = perf_counter() - started
            token_ids.append(int(token_id))
        return Answer(tuple(token_ids), perf_counter() - started, first_s, 1)
