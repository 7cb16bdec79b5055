"""Fixtures that several packages' tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specdiff_dist.models import ModelFolder, resolve


@pytest.fixture(scope="session")
def embedded_model() -> ModelFolder:
    """The embedded verifier's folder. The first run on a machine fetches and converts it, about a minute."""
    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def gsm8k() -> Path:
    """GSM8K's test questions (JSON lines), from $SPECDIFF_DATA or ../shared/data beside the checkout."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    file = Path(os.environ.get("SPECDIFF_DATA", beside)) / "gsm8k" / "test.jsonl"
    if not file.is_file():
        pytest.skip(f"no GSM8K at {file}: set SPECDIFF_DATA to the folder that holds gsm8k/test.jsonl")
    return file
