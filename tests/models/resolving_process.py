"""A process that resolves the embedded model with a stand-in for the conversion; run by test_embedded.py.

    python -m tests.models.resolving_process CACHE WHEEL SHA256 LOG MODE

Each conversion appends a line to LOG. MODE `crash` kills the process when half of the folder is written.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from specdiff_dist.models import conversion, embedded, resolve
from tests.models.tiny_folder import write_tiny_folder


def main(cache: str, wheel: str, sha256: str, log: str, mode: str) -> None:
    def convert(source: Path, target: Path, *, next_step: str) -> None:
        with open(log, "a") as stream:
            stream.write("converted\n")
        if mode == "crash":
            (target / "config.json").write_text("{")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        write_tiny_folder(target)

    conversion.convert_gguf = convert
    embedded.WHEEL_SHA256 = sha256
    os.environ["SPECDIFF_EMBEDDED_WHEEL"] = wheel
    print(resolve("smollm2-135m", cache_dir=Path(cache)).path)


if __name__ == "__main__":
    main(*sys.argv[1:])
