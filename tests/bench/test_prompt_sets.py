"""Which prompts `bench speed` runs on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdiff_dist.bench.prompt_sets import KNOWN_SETS, read_sets
from specdiff_dist.bench.prompts import PROMPTS
from specdiff_dist.errors import InvalidRequest


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("SPECDIFF_DATA", raising=False)
    lines = {
        "gsm8k": [{"question": f"question {i}", "answer": "1"} for i in range(10)],
        "mt_bench": [{"turns": ["first turn", "second turn"]}],
        "humaneval": [{"prompt": "def f():\n", "canonical_solution": "    pass"}],
    }
    for name, items in lines.items():
        path = tmp_path / "data" / KNOWN_SETS[name]
        path.parent.mkdir(parents=True)
        path.write_text("\n".join(map(json.dumps, items)))
    return tmp_path / "data"


def test_known_sets_are_read_from_the_data_folder(data, monkeypatch):
    sets = read_sets(["gsm8k,mt_bench", "humaneval"], data, 3)
    assert [one.name for one in sets] == ["gsm8k", "mt_bench", "humaneval"]
    assert sets[0].prompts == ("question 0", "question 3", "question 6")  # spread over the set
    assert sets[1].prompts == ("first turn",)
    assert sets[2].prompts == ("def f():\n",)
    monkeypatch.setenv("SPECDIFF_DATA", str(data))
    assert read_sets(["gsm8k"], None, 3)[0] == sets[0]


def test_without_sets_the_builtin_prompts_are_taken():
    (only,) = read_sets([], None, 100)
    assert (only.name, only.prompts) == ("builtin", PROMPTS)


def test_a_file_is_a_set(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n{"prompt": "a\u2028b"}\n', encoding="utf-8")
    (only,) = read_sets([f"mine={file}"], None, 5)
    assert only.name == "mine"
    assert only.prompts == ([{"role": "user", "content": "hi"}], "a\u2028b")


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["best"], "unknown set 'best'; give NAME=FILE.jsonl, or one of builtin, gsm8k, mt_bench, humaneval"),
        (["gsm8k"], "no data folder is given; give --data FOLDER .or SPECDIFF_DATA. that holds gsm8k/test.jsonl"),
        (["builtin", "builtin"], "the set 'builtin' is given twice"),
        (["mine=missing.jsonl"], "cannot read missing.jsonl"),
    ],
)
def test_what_is_missing_is_said(specs, message, monkeypatch):
    monkeypatch.delenv("SPECDIFF_DATA", raising=False)
    with pytest.raises(InvalidRequest, match=message):
        read_sets(specs, None, 5)


def test_an_absent_file_of_a_set_and_an_empty_set_are_errors(data, tmp_path):
    (data / KNOWN_SETS["gsm8k"]).unlink()
    with pytest.raises(InvalidRequest, match=r"test\.jsonl is not there; give --data"):
        read_sets(["gsm8k"], data, 5)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InvalidRequest, match="has no prompts"):
        read_sets([f"empty={tmp_path / 'empty.jsonl'}"], None, 5)
