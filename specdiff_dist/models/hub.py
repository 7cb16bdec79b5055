"""Models from the Hugging Face hub: data files only, never code."""

from __future__ import annotations

import re
from pathlib import Path

from specdiff_dist.errors import ModelUnavailable

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w][\w.-]*", re.ASCII)
WANTED = ["*.json", "*.safetensors", "*.jinja", "LICENSE*"]
UNWANTED = ["*/*", "consolidated*"]  # other formats in subfolders, and the same weights a second time


def hub_folder(hub_id: str, cache_dir: Path | None) -> Path:
    """Local folder of a hub model, downloaded where it is not yet, into the hub's own cache unless told otherwise.

    Raises ModelUnavailable when the hub cannot be reached or does not give the model.
    """
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        folder = snapshot_download(hub_id, allow_patterns=WANTED, ignore_patterns=UNWANTED, cache_dir=cache_dir)
    except GatedRepoError as error:
        raise ModelUnavailable(
            f"{hub_id} is gated: accept its terms on the hub and set HF_TOKEN, or name a local folder"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelUnavailable(
            f"{hub_id} is no local folder, and the hub has no public model of this name; check the spelling, "
            "or set HF_TOKEN if it is private"
        ) from error
    except (HfHubHTTPError, httpx.HTTPError, OSError, ValueError) as error:  # LocalEntryNotFoundError among them
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelUnavailable(
            f"{hub_id} is no local folder, and cannot be fetched from the hub ({reason}); "
            "check the network or HF_ENDPOINT, or name a local model folder"
        ) from error
    return Path(folder)
