"""The application on a Ray of its own, for measurements."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve

from deployments.builder import app
from deployments.settings import AppSettings

APP_NAME = "specdiff-bench"


@contextmanager
def running_app(settings: AppSettings, *, route_prefix: str | None, **serve_options: Any) -> Iterator[None]:
    """Runs while the context lasts. `serve_options` are those of `serve.start`. Raises the errors of specdiff_dist.errors."""
    with running_ray(**serve_options):
        serve.run(app(settings), name=APP_NAME, route_prefix=route_prefix)
        yield


@contextmanager
def running_ray(**serve_options: Any) -> Iterator[None]:
    """A Ray of its own, with Serve and no application yet."""
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        serve.start(logging_config={"log_level": "ERROR"}, **serve_options)
        yield
    finally:
        ray.shutdown()  # the cluster is ours alone: what runs in it ends with it
