from __future__ import annotations

import stat

import pytest

from specdiff_dist.errors import ModelUnavailable
from specdiff_dist.verifiers.kernels import build, why_no_kernels

pytestmark = pytest.mark.usefixtures("no_memory")


@pytest.fixture
def no_memory(tmp_path, monkeypatch):
    """An empty cache folder, and no kernels loaded so far."""
    monkeypatch.setenv("SPECDIFF_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(build.OFF, raising=False)
    build.library.cache_clear()
    yield
    build.library.cache_clear()


def fake_compiler(folder, body: str) -> str:
    path = folder / "compiler"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.skipif(bool(why_no_kernels()), reason=f"no kernels here: {why_no_kernels()}")
def test_they_are_compiled_once(tmp_path, monkeypatch):
    build.library()
    (made,) = (tmp_path / "cache" / "kernels").glob("*.so")
    build.library.cache_clear()
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    build.library()
    assert list((tmp_path / "cache" / "kernels").glob("*.so")) == [made]


def test_a_failing_compiler_is_quoted_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, "echo 'no such option' >&2; exit 1"))
    with pytest.raises(ModelUnavailable, match="no such option"):
        build.library()
    assert not list((tmp_path / "cache" / "kernels").glob("*.so"))
    assert not list((tmp_path / "cache" / "kernels").glob(".*tmp*"))


def test_a_result_that_is_no_library_is_named(tmp_path, monkeypatch):
    script = 'while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"'
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, script))
    with pytest.raises(ModelUnavailable, match="cannot be used"):
        build.library()


@pytest.mark.parametrize("name", ["no-such-compiler", None])
def test_without_a_compiler_the_message_says_what_to_install(name, tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    if name:
        monkeypatch.setenv("CXX", name)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModelUnavailable, match=r"install one, for instance g\+\+"):
        build.library()


def test_they_can_be_turned_off(monkeypatch):
    monkeypatch.setenv(build.OFF, "1")
    with pytest.raises(ModelUnavailable, match=build.OFF):
        build.library()
