"""What a model's name means."""

from __future__ import annotations

from pathlib import Path, PurePath

from specdiff_dist.errors import ModelUnavailable
from specdiff_dist.models.cache import Progress, cache_root
from specdiff_dist.models.embedded import ALIASES, EMBEDDED_MODEL, embedded_folder
from specdiff_dist.models.folder import ModelFolder, read_folder
from specdiff_dist.models.hub import HUB_ID, hub_folder


def resolve(name: str, *, cache_dir: Path | None = None, progress: Progress | None = None) -> ModelFolder:
    """A checked local folder for `name`: the embedded model, else an existing folder, else a hub id `org/name`.

    cache_dir: where models are kept; default $SPECDIFF_CACHE or ~/.cache/specdiff (hub models: the hub's own cache).
    progress: told in words what takes long. The first call for a model may take minutes, later ones milliseconds.

    Raises ModelUnavailable with the next step.
    """
    report = progress if progress is not None else _say_nothing
    if name.lower() in ALIASES:
        return embedded_folder(cache_root() if cache_dir is None else cache_dir, report)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return read_folder(path.resolve(), path.resolve().name)
    if HUB_ID.fullmatch(name) and ".." not in name:
        report(f"looking for {name} on the model hub")
        return read_folder(hub_folder(name, None if cache_dir is None else cache_dir / "hub"), name)
    if len(PurePath(name).parts) > 1 or name.startswith(("/", ".", "~", "\\")):
        raise ModelUnavailable(f"{name} is no folder; give the folder that holds the model's config.json")
    raise ModelUnavailable(
        f"unknown model {name!r}; known is {EMBEDDED_MODEL}, and any local folder or hub id (org/name) can be named"
    )


def _say_nothing(message: str) -> None:
    del message
