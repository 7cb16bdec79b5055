"""What names mean, and what is said when they mean nothing here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from specdiff_dist.errors import ModelUnavailable
from specdiff_dist.models import ModelFolder, resolve
from specdiff_dist.models.cache import cache_root
from specdiff_dist.types import SamplingParams

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["nope", "", "smollm2", "smollm2-135m:fast"])
def test_a_bare_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ModelUnavailable, match=r"unknown model .*known is smollm2-135m"):
        resolve(name)


@pytest.mark.parametrize(
    "name", ["/etc/hosts", "../../etc/absent", "./x", "a/../b", "a/b/c", "~/absent", "http://host/x"]
)
def test_what_can_only_be_a_path_never_reaches_the_hub(name, monkeypatch):
    def refuse(hub_id: str, cache_dir: Path | None) -> Path:
        raise AssertionError(f"{hub_id} went to the hub")

    monkeypatch.setattr(sys.modules[resolve.__module__], "hub_folder", refuse)
    with pytest.raises(ModelUnavailable, match="is no folder"):
        resolve(name)


def test_the_cache_folder_can_be_moved(monkeypatch, tmp_path):
    monkeypatch.delenv("SPECDIFF_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "specdiff"
    monkeypatch.setenv("SPECDIFF_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
    monkeypatch.delenv("SPECDIFF_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "specdiff"


def test_resolving_loads_neither_torch_nor_transformers(embedded_model):
    script = (
        "import sys; from specdiff_dist.models import resolve; from specdiff_dist.text import Tokenizer\n"
        "Tokenizer.load(resolve('smollm2-135m').path).encode('x', add_special_tokens=True)\n"
        "print(*[name for name in ('torch', 'transformers', 'huggingface_hub', 'ray') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_the_embedded_model(embedded_model: ModelFolder):
    assert embedded_model.name == "smollm2-135m"
    assert embedded_model.eos_token_ids == (2,)
    assert embedded_model.max_model_len == 8192
    assert embedded_model.default_sampling == SamplingParams(temperature=0.2, top_p=0.9)
    assert embedded_model.has_chat_template
