"""Prompt files in every form, and what a bad line is told."""

from __future__ import annotations

import hashlib
import json

import pytest

from specdiff_dist.errors import InvalidRequest
from specdiff_dist.train.prompts import read_prompt_file

GOOD = [
    ({"question": "How many?", "answer": "4"}, ["How many?"]),
    ({"task_id": "HumanEval/0", "prompt": "def f():"}, ["def f():"]),
    ({"instruction": "Shorten it.", "instances": [{"input": "A long text.", "output": "x"}]}, ["Shorten it.\n\nA long text."]),
    ({"instruction": "Tell a joke.", "instances": [{"input": "  ", "output": "x"}]}, ["Tell a joke."]),
    ({"turns": ["First.", "Second."]}, ["First.", "Second."]),
    ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}, ["Hi"]),
]  # fmt: skip


@pytest.mark.parametrize(("item", "texts"), GOOD)
def test_every_form_is_read(tmp_path, item, texts):
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps(item) + "\n\n")
    read = read_prompt_file(file)
    assert [prompt.user_texts for prompt in read.prompts] == [texts]
    assert read.prompts[0].messages[-1] == {"role": "user", "content": texts[0]}
    assert read.name == "p.jsonl"
    assert read.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_conversation_keeps_what_came_before_its_last_question(tmp_path):
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "A?"},
        {"role": "assistant", "content": "B."},
        {"role": "user", "content": "C?"},
        {"role": "assistant", "content": "D."},
    ]
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"messages": messages}))
    assert read_prompt_file(file).prompts[0].messages == tuple(messages[:4])


def test_unicode_line_separators_do_not_split_a_line(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"question": "a\u2028b\x0bc"}, ensure_ascii=False), encoding="utf-8")
    assert read_prompt_file(file).prompts[0].user_texts == ["a\u2028b\x0bc"]


BAD = [
    ("{", "is not JSON"),
    ("[]", "is no JSON object"),
    ('{"answer": "4"}', 'has no "question"'),
    ('{"question": ""}', '"question" must be a text'),
    ('{"instruction": 3}', '"instruction" must be a text'),
    ('{"turns": []}', '"turns" must be'),
    ('{"messages": [{"role": "user"}]}', 'needs a "role" and a "content"'),
    ('{"messages": [{"role": "system", "content": "x"}]}', "no message of the user"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_bad_line_is_named(tmp_path, line, message):
    file = tmp_path / "p.jsonl"
    file.write_text('{"question": "good"}\n\n' + line)
    with pytest.raises(InvalidRequest, match=rf"p\.jsonl, line 3.*{message}"):
        read_prompt_file(file)


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(InvalidRequest, match=r"cannot read .*none\.jsonl"):
        read_prompt_file(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InvalidRequest, match="has no prompts"):
        read_prompt_file(tmp_path / "empty.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "\xe9"}')
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        read_prompt_file(tmp_path / "latin.jsonl")
