"""`specdiff train-drafter`, the data part: keys, resuming, errors."""

from __future__ import annotations

import json

import pytest

from tests.train.tiny_chat import some_prompts, write_chat_model, write_prompts


@pytest.fixture
def command(tmp_path) -> tuple[object, ...]:
    model = write_chat_model(tmp_path / "model")
    asked = write_prompts(tmp_path / "asked.jsonl", some_prompts(20))
    known = write_prompts(tmp_path / "known.jsonl", some_prompts(3))
    return (
        *("train-drafter", "--data-only", "--json", "--verifier", model, "--output", tmp_path / "out"),
        *("--prompts", asked, "--evaluation-prompts", known, "--max-new-tokens", 40, "--shard-size", 8),
    )  # fmt: skip


def test_answers_are_made_and_resumed(specdiff, command, tmp_path):
    code, out, err = specdiff(*command, "--num-answers", 10)
    assert code == 0, err
    data = json.loads(out.splitlines()[-1])["data"]
    assert data["num_answers"] >= 10
    assert data["num_contaminated"] == 3
    assert data["tokens_per_s"] > 0
    assert "0 of 17 training prompts occur in the evaluation sets" in err
    again = json.loads(specdiff(*command, "--num-answers", 10)[1])["data"]
    assert (again["num_answers"], again["num_tokens"]) == (data["num_answers"], 0)
    assert (tmp_path / "out" / "data" / "meta.json").exists()


def test_an_unreadable_prompt_file_is_one_line_and_code_2(specdiff, command, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"question": "a"}\nno json\n')
    code, _, err = specdiff(*command, "--prompts", tmp_path / "bad.jsonl")
    assert code == 2
    assert "bad.jsonl, line 2 is not JSON" in err.replace("\n", " ")
