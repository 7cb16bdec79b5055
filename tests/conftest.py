"""Fixtures that several packages' tests share."""

from __future__ import annotations

import pytest

from specdiff_dist.models import ModelFolder, resolve


@pytest.fixture(scope="session")
def embedded_model() -> ModelFolder:
    """The embedded verifier's folder. The first run on a machine fetches and converts it, about a minute."""
    return resolve("smollm2-135m")
