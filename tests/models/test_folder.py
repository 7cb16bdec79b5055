"""What a model folder must hold, and what it says about itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specdiff_dist.errors import ModelUnavailable
from specdiff_dist.models import resolve
from specdiff_dist.types import SamplingParams
from tests.models.tiny_folder import CONFIG, write_safetensors, write_tiny_folder

ROOT = Path(__file__).resolve().parents[2]


def test_a_complete_folder(tmp_path, monkeypatch):
    write_tiny_folder(tmp_path / "mine")
    folder = resolve(str(tmp_path / "mine"))
    assert (folder.name, folder.path) == ("mine", tmp_path / "mine")
    assert (folder.eos_token_ids, folder.max_model_len, folder.has_chat_template) == ((7,), 128, False)
    monkeypatch.chdir(tmp_path)
    assert resolve("mine") == resolve("./mine") == folder


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_the_missing_file_is_named(tmp_path, missing):
    (write_tiny_folder(tmp_path) / missing).unlink()
    with pytest.raises(ModelUnavailable, match=missing):
        resolve(str(tmp_path))


def test_pickled_weights_do_not_count(tmp_path):
    folder = write_tiny_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelUnavailable, match=r"model\.safetensors"):
        resolve(str(folder))


def test_every_shard_must_be_there(tmp_path):
    folder = write_tiny_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelUnavailable, match=r"has no model-2\.safetensors"):
        resolve(str(folder))
    write_safetensors(folder / "model-2.safetensors")
    assert resolve(str(folder)).max_model_len == 128


@pytest.mark.parametrize("keep", [0, 5, 20, -1])
def test_cut_off_weights_are_noticed(tmp_path, keep):
    file = write_tiny_folder(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelUnavailable, match="damaged or incomplete"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("content", ["{", "[1]", "\xff"])
def test_a_broken_config_is_named(tmp_path, content):
    (write_tiny_folder(tmp_path) / "config.json").write_text(content, "latin-1")
    with pytest.raises(ModelUnavailable, match=r"config\.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, SamplingParams()),
        ({"do_sample": False}, SamplingParams()),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 20}, SamplingParams(0.6, 20, 0.9)),
        ({"temperature": None, "top_k": -1}, SamplingParams()),
        ({"min_p": 0.05}, SamplingParams(min_p=0.05)),
        ({"do_sample": False, "temperature": 0.2}, SamplingParams(0.2)),
    ],
)
def test_default_sampling_comes_from_the_generation_config(tmp_path, generation, expected):
    assert resolve(str(write_tiny_folder(tmp_path, generation=generation))).default_sampling == expected


def test_a_senseless_generation_config_is_refused(tmp_path):
    write_tiny_folder(tmp_path, generation={"top_p": 7})
    with pytest.raises(ModelUnavailable, match=r"generation_config\.json.*top_p"):
        resolve(str(tmp_path))


def test_eos_ids_of_the_generation_config_come_first(tmp_path):
    write_tiny_folder(tmp_path, generation={"eos_token_id": [3, 5, 3]})
    assert resolve(str(tmp_path)).eos_token_ids == (3, 5)


def test_facts_of_a_multimodal_config_come_from_its_text_part(tmp_path):
    write_tiny_folder(tmp_path, config={"text_config": {"max_position_embeddings": 99, "eos_token_id": [4]}})
    folder = resolve(str(tmp_path))
    assert (folder.max_model_len, folder.eos_token_ids) == (99, (4,))


def test_no_context_length_is_an_error(tmp_path):
    write_tiny_folder(tmp_path, config={"model_type": "llama"})
    with pytest.raises(ModelUnavailable, match="max_position_embeddings"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("where", ["file", "config", "list"])
def test_the_chat_template_is_seen_in_all_three_places(tmp_path, where):
    folder = write_tiny_folder(tmp_path)
    if where == "file":
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    else:
        named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "{{ messages }}"}]
        template = "{{ messages }}" if where == "config" else named
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert resolve(str(folder)).has_chat_template


def test_code_in_a_model_folder_never_runs(tmp_path):
    """K29 row 158: the marker that the folder's own code would write stays absent, known model type or not."""
    marker = tmp_path / "marker"
    code = "modeling_evil.EvilForCausalLM"
    tiny = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 8}
    auto_map = {"AutoConfig": "modeling_evil.EvilConfig", "AutoModelForCausalLM": code, "AutoTokenizer": [None, code]}
    folders = []
    for model_type in ("llama", "made_up"):
        config = CONFIG | tiny | {"model_type": model_type, "auto_map": auto_map}
        folder = write_tiny_folder(tmp_path / model_type, config=config)
        (folder / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w').write('ran')\n")
        assert resolve(str(folder)).max_model_len == 128
        folders.append(str(folder))
    done = subprocess.run(
        [sys.executable, "-c", LOAD_ALL, *folders],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "made_up refused", done.stderr
    assert not marker.exists()


LOAD_ALL = """
import sys
from pathlib import Path
from specdiff_dist.errors import ModelUnavailable
from specdiff_dist.verifiers import load_verifier
for folder in sys.argv[1:]:
    try:
        load_verifier(folder, device="cpu")
    except ModelUnavailable:
        print(Path(folder).name, "refused")
"""
