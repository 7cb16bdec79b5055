"""The round loop. `decode` is all a caller needs."""

from specdiff_dist.engine.decode import decode

__all__ = ["decode"]
