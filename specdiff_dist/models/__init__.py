"""From a model's name to a local folder that a verifier can load. Needs neither torch nor transformers."""

from specdiff_dist.models.embedded import EMBEDDED_MODEL
from specdiff_dist.models.folder import ModelFolder
from specdiff_dist.models.resolve import resolve

__all__ = ["EMBEDDED_MODEL", "ModelFolder", "resolve"]
