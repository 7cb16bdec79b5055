"""Thin Ray Serve shells. `serve run deployments:app` builds the application from builder.app.

`app` is found on first use, so that the parts that know nothing of Ray can be imported without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deployments.builder import app

__all__ = ["app"]


def __getattr__(name: str) -> object:
    if name == "app":
        from deployments.builder import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
