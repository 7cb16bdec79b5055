"""The import rule of the README: who may know of Ray, gRPC, torch and transformers."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(
    path
    for folder in ("specdiff_dist", "deployments")
    for path in (ROOT / folder).rglob("*.py")
    if "__pycache__" not in path.parts
)

# package -> folders (or files) that may import it; everything else may not
ALLOWED = {
    "ray": ("deployments", "specdiff_dist/transport/handle_client.py"),
    "fastapi": ("deployments",),
    "starlette": ("deployments",),
    "grpc": ("specdiff_dist/transport", "specdiff_dist/pb"),
    "google": ("specdiff_dist/transport", "specdiff_dist/pb"),
    "torch": (
        "specdiff_dist/drafters",
        "specdiff_dist/verifiers",
        "specdiff_dist/train",
        "specdiff_dist/bench/dense_torch.py",  # a baseline that is torch by nature
        "specdiff_dist/bench/baselines.py",
    ),
    "transformers": (
        "specdiff_dist/drafters",
        "specdiff_dist/verifiers",
        "specdiff_dist/train",
        "specdiff_dist/bench/baselines.py",
    ),
}


def imported_packages(source: str) -> set[str]:
    """Top-level packages imported anywhere in `source`, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def is_allowed(package: str, relative: str) -> bool:
    return any(relative == home or relative.startswith(f"{home}/") for home in ALLOWED[package])


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_packages_stay_in_their_folders(path):
    relative = path.relative_to(ROOT).as_posix()
    found = imported_packages(path.read_text())
    forbidden = {package for package in ALLOWED if package in found and not is_allowed(package, relative)}
    assert not forbidden, f"{relative} may not import {', '.join(sorted(forbidden))}"


@pytest.mark.parametrize("path", sorted((ROOT / "specdiff_dist" / "core").glob("*.py")), ids=lambda path: path.name)
def test_core_needs_numpy_alone(path):
    foreign = imported_packages(path.read_text()) - set(sys.stdlib_module_names) - {"numpy", "specdiff_dist"}
    assert not foreign, f"core/{path.name} may not import {', '.join(sorted(foreign))}"


def test_the_scan_sees_imports_inside_functions():
    assert imported_packages("def f():\n    import torch.nn\n    from ray import serve\n") == {"torch", "ray"}


def loaded_after(statement: str, packages: tuple[str, ...]) -> list[str]:
    """Which of `packages` a fresh interpreter has loaded after `statement`."""
    script = f"{statement}\nimport sys\nprint(*[name for name in {packages!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("module", ["deployments.router", "deployments.ingress"])
def test_the_router_process_has_neither_torch_nor_transformers(module):
    assert loaded_after(f"import {module}, specdiff_dist.engine", ("torch", "transformers")) == []


def test_the_library_knows_nothing_of_ray_or_http():
    statement = "import specdiff_dist.api, specdiff_dist.cli, specdiff_dist.engine, specdiff_dist.transport"
    assert loaded_after(statement, ("ray", "fastapi", "torch", "transformers")) == []
