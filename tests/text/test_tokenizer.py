"""The tokenizer equals transformers' own, and says clearly what it cannot do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import processors

from specdiff_dist.errors import InvalidRequest, ModelUnavailable
from specdiff_dist.models import ModelFolder
from specdiff_dist.text import Tokenizer
from tests.text.small_tokenizers import FAMILIES, byte_level

SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "  What is 12 + 30?\n\n1. think\n  2. answer 🙂"},
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "<|im_end|> 你好, e\u0301\t{{ 1 }} {% raw %}"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "Und   noch etwas?"},
]
CONVERSATIONS = [TURNS[:1], TURNS[:3], TURNS, [SYSTEM, *TURNS[:1]], [SYSTEM, *TURNS]]


@pytest.fixture(scope="session")
def embedded(embedded_model: ModelFolder) -> Tokenizer:
    return Tokenizer.load(embedded_model.path)


@pytest.fixture(scope="session")
def reference(embedded_model: ModelFolder):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(embedded_model.path)


def write_folder(folder: Path, template: str | None, *, adds_bos: bool = False, **config: object) -> Path:
    backend = byte_level()
    if adds_bos:
        bos = backend.token_to_id("<s>")
        assert bos is not None
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", bos)])
    backend.save(str(folder / "tokenizer.json"))
    content = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content | {"chat_template": template}))
    return folder


class TestAgainstTransformers:
    @pytest.mark.parametrize("messages", CONVERSATIONS, ids=lambda messages: f"{len(messages)} messages")
    def test_chat_templates(self, embedded, reference, messages):
        expected = reference.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
        assert embedded.apply_chat_template(messages) == expected

    @pytest.mark.parametrize(
        "text", ["", " ", "Hello", " a  b\n\n 3.14 1999\n\n1.", "你好🙂", "<|im_start|>x<|im_end|>"]
    )
    def test_texts(self, embedded, reference, text):
        token_ids = embedded.encode(text, add_special_tokens=True)
        assert token_ids == reference(text)["input_ids"]
        for skip in (True, False):
            expected = reference.decode(token_ids, skip_special_tokens=skip)
            assert embedded.decode(token_ids, skip_special_tokens=skip) == expected

    def test_facts(self, embedded, reference):
        assert embedded.vocab_size == len(reference) == 49_152
        assert (embedded.bos_token_id, embedded.eos_token_id) == (reference.bos_token_id, reference.eos_token_id)
        assert embedded.has_chat_template

    @pytest.mark.parametrize(
        "template",
        [
            "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }} {{ tools is none }}",
            "{% for m in messages %}\n  {% generation %}{{ m.content }}\n{% endgeneration %}\n{% endfor %}{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}",
            "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m['content'] | trim }}{% endfor %}",
            "{{ strftime_now('%Y') }}{{ bos_token }}{{ eos_token }}{{ absent }}{% if add_generation_prompt %}>{% endif %}",
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        ],
    )
    def test_what_templates_may_use(self, tmp_path, template):
        transformers = pytest.importorskip("transformers")
        write_folder(tmp_path, template)
        ours = Tokenizer.load(tmp_path)
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
        messages = [*TURNS, {"role": "assistant", "content": None, "tool_calls": [{"a": "é<"}]}][::5]
        expected = theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
        assert ours.apply_chat_template(messages) == expected


def test_single_digits_are_split_before_the_byte_level_step(embedded):
    """What the model was trained on, and what GGUF readers lose: "\\n\\n" before a digit is one token."""
    tokens = [embedded.decode([token_id]) for token_id in embedded.encode("a\n\n12", add_special_tokens=False)]
    assert tokens == ["a", "\n\n", "1", "2"]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_exactly_one_bos(tmp_path, adds_bos):
    """K17 row 83: a template with BOS and a tokenizer that adds BOS."""
    tokenizer = Tokenizer.load(write_folder(tmp_path, "{{ bos_token }}{{ messages[0].content }}", adds_bos=adds_bos))
    token_ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    bos = tokenizer.bos_token_id
    assert bos is not None and token_ids[0] == bos
    assert token_ids.count(bos) == 1
    assert tokenizer.encode("hi", add_special_tokens=True).count(bos) == adds_bos


class TestRefusals:
    def test_a_role_that_the_template_does_not_take(self, tmp_path):
        """K17 row 85."""
        template = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        tokenizer = Tokenizer.load(write_folder(tmp_path, template))
        with pytest.raises(InvalidRequest, match=r"roles: system, user\): System role not supported") as caught:
            tokenizer.apply_chat_template([SYSTEM, TURNS[0]])
        assert caught.value.param == "messages"
        assert tokenizer.apply_chat_template(TURNS[:1]) == []

    @pytest.mark.parametrize(
        "template",
        [
            "{{ messages[0].name.first }}",
            "{{ messages[7].content + 'x' }}",
            "{{ 'x' + messages[0].number }}",
            "{{ 1 / 0 }}",
        ],
    )
    def test_a_template_that_stumbles_over_the_messages(self, tmp_path, template):
        tokenizer = Tokenizer.load(write_folder(tmp_path, template))
        with pytest.raises(InvalidRequest, match="roles: user"):
            tokenizer.apply_chat_template([{"role": "user", "number": 1}])

    @pytest.mark.parametrize("template", ["{{ ''.__class__.__mro__[1] }}", "{{ messages.append(1) }}"])
    def test_templates_are_sandboxed(self, tmp_path, template):
        tokenizer = Tokenizer.load(write_folder(tmp_path, template))
        with pytest.raises(InvalidRequest, match=r"unsafe|not safely callable"):
            tokenizer.apply_chat_template(TURNS)

    def test_no_template(self, tmp_path):
        tokenizer = Tokenizer.load(write_folder(tmp_path, None))
        assert not tokenizer.has_chat_template
        with pytest.raises(InvalidRequest, match="/v1/completions"):
            tokenizer.apply_chat_template(TURNS)

    def test_a_template_that_is_no_template(self, tmp_path):
        with pytest.raises(ModelUnavailable, match="line 2"):
            Tokenizer.load(write_folder(tmp_path, "x\n{% for %}"))

    @pytest.mark.parametrize("text", ["\ud83d", "a\udc00b"])
    def test_text_that_is_not_unicode(self, embedded, text):
        with pytest.raises(InvalidRequest, match="not valid Unicode"):
            embedded.encode(text, add_special_tokens=False)
        with pytest.raises(InvalidRequest, match="not valid Unicode"):
            embedded.apply_chat_template([{"role": "user", "content": text}])

    def test_folders_without_a_readable_tokenizer(self, tmp_path):
        with pytest.raises(ModelUnavailable, match=r"no tokenizer\.json"):
            Tokenizer.load(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(ModelUnavailable, match=r"tokenizer\.json cannot be read"):
            Tokenizer.load(tmp_path)


class TestFolder:
    def test_special_tokens_of_older_folders(self, tmp_path):
        write_folder(tmp_path, "{{ bos_token }}")
        (tmp_path / "tokenizer_config.json").unlink()
        (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}')
        (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}")
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.apply_chat_template(TURNS) == [tokenizer.bos_token_id, tokenizer.eos_token_id]

    def test_ids_of_the_config_serve_where_no_token_is_named(self, tmp_path):
        write_folder(tmp_path, None, bos_token=None, eos_token=None)
        (tmp_path / "config.json").write_text('{"bos_token_id": 3, "eos_token_id": [5, 6]}')
        tokenizer = Tokenizer.load(tmp_path)
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (3, 5)

    def test_settings_of_a_training_run_are_ignored(self, tmp_path):
        write_folder(tmp_path, None)
        content = json.loads((tmp_path / "tokenizer.json").read_text())
        content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
        content["padding"] = {
            "strategy": {"Fixed": 9}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "!",
            "pad_to_multiple_of": None,
        }  # fmt: skip
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        assert len(Tokenizer.load(tmp_path).encode("hello", add_special_tokens=False)) == 5

    def test_vocabulary_size_counts_gaps(self, tmp_path):
        write_folder(tmp_path, None)
        content = json.loads((tmp_path / "tokenizer.json").read_text())
        content["model"]["vocab"]["zzz"] = 999
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        assert Tokenizer.load(tmp_path).vocab_size == 1000


class TestSingleTokens:
    @pytest.mark.parametrize(
        "name", ["byte-level", "byte-level, fused", "llama", "gemma", "metaspace", "wordpiece", "none"]
    )
    def test_their_bytes_make_up_the_text_behind_a_prompt(self, name):
        tokenizer = Tokenizer(FAMILIES[name]())
        prompt = tokenizer.encode("he", add_special_tokens=False)
        for text in ("he hello world", "hello he  ab", "a b<tool>a two words b", "é 你 好 he"):
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            detokenizer = tokenizer.detokenizer(prompt)
            shown = "".join(detokenizer.push(token_id) for token_id in token_ids) + detokenizer.flush()
            assert b"".join(map(tokenizer.token_bytes, token_ids)).decode() == shown
            assert not any(map(tokenizer.is_special, token_ids))

    def test_parts_of_characters_special_tokens_and_ids_that_are_none(self):
        tokenizer = Tokenizer(FAMILIES["llama"]())
        euro = tokenizer.encode("€", add_special_tokens=False)[1:]  # behind the space that it puts first
        assert [tokenizer.token_bytes(token_id) for token_id in euro] == [b"\xe2", b"\x82", b"\xac"]
        special = tokenizer.encode("</s>", add_special_tokens=False)[-1]
        assert (tokenizer.token_bytes(special), tokenizer.is_special(special)) == (b"</s>", True)
        for none in (tokenizer.vocab_size, 2**31 - 1):
            assert (tokenizer.token_bytes(none), tokenizer.is_special(none)) == (b"", True)
