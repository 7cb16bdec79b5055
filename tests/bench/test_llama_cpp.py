"""llama.cpp as a contender; the library itself is not needed for tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdiff_dist.bench.llama_cpp import LlamaCppContender
from specdiff_dist.bench.speed import LLAMA_CPP, Answer, set_report
from specdiff_dist.errors import InvalidConfig
from specdiff_dist.types import SamplingParams


class FakeLlama:
    """Counts on from the prompt's last token, for ever."""

    def __init__(self, path: str, **options: Any) -> None:
        if path == "missing.gguf":
            raise ValueError("Model path does not exist")
        self.options, self.n_tokens, self.asked = options, 99, {}

    def set_seed(self, seed: int) -> None:
        self.seed = seed

    def reset(self) -> None:
        self.n_tokens = 0

    def generate(self, tokens: list[int], **options: Any) -> Iterator[int]:
        self.asked = options
        token = tokens[-1]
        while True:
            token += 1
            yield token


@pytest.fixture(autouse=True)
def library(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=FakeLlama))


def contender(sampling: SamplingParams, path: str = "model.gguf") -> LlamaCppContender:
    return LlamaCppContender(Path(path), sampling, 5, context=64, num_threads=2)


def test_it_answers_as_many_tokens_as_asked_for():
    answer = contender(SamplingParams(0.0))(SimpleNamespace(token_ids=(1, 2, 3), seed=7))  # pyright: ignore
    assert answer.token_ids == (4, 5, 6, 7, 8)
    assert answer.first_s is not None and 0 <= answer.first_s <= answer.seconds


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_it_samples_as_the_others_do(temperature):
    one = contender(SamplingParams(temperature, top_k=50, top_p=0.95))
    one(SimpleNamespace(token_ids=(1,), seed=1))  # pyright: ignore[reportArgumentType]
    asked = one._llama.asked
    assert (asked["temp"], asked["repeat_penalty"], asked["min_p"]) == (temperature, 1.0, 0.0)
    assert ("top_k" in asked) == (temperature > 0)


def test_what_is_missing_is_named(monkeypatch):
    with pytest.raises(InvalidConfig, match=r"missing\.gguf"):
        contender(SamplingParams(0.0), "missing.gguf")
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(InvalidConfig, match="pip install llama-cpp-python"):
        contender(SamplingParams(0.0))


def test_the_report_has_its_ratio():
    answers = {"drafter x": [Answer((1, 2), 1.0)], LLAMA_CPP: [Answer((1, 2), 3.0)]}
    report = set_report(answers, {"x": "drafter x"}, is_greedy=True)
    assert report["speedup_vs_llama_cpp"] == 3.0
    assert report["baselines"][LLAMA_CPP]["tokens_per_s"] == pytest.approx(2 / 3)
