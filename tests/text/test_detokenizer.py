"""Streaming gives, byte for byte, the text that decoding everything at once gives (K07, K08)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, cast

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from specdiff_dist.text import Tokenizer
from specdiff_dist.text.detokenizer import DetokenizerFactory
from tests.text.small_tokenizers import BYTES, FAMILIES, LETTERS, byte_level, llama

FAMILY = "👩‍👩‍👧‍👦"
MIXED = ("漢字かな交じり文、한국어 " + FAMILY + " e\u0301 n\u0303 🏳️‍🌈 👍🏽 ") * 30
ALL = {name: Tokenizer(build()) for name, build in FAMILIES.items()}
# Families whose text is byte-exact both ways; WordPiece and "none" lose spaces by design.
LOSSLESS = ["byte-level", "byte-level, fused", "llama", "gemma"]

BYTE_IDS = {byte: byte_level().token_to_id(letter) or 0 for byte, letter in LETTERS.items()}
# The ends of every range in the definition of UTF-8, and "a".
TELLING_BYTES = bytes.fromhex("61 80 8f 90 9f a0 bf c2 df e0 e1 ec ed ee ef f0 f1 f3 f4")


@pytest.fixture(scope="session")
def embedded(embedded_model) -> Tokenizer:
    return Tokenizer.load(embedded_model.path)


def stream(tokenizer: Tokenizer, prompt: Sequence[int], generated: Sequence[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt)
    return [*(detokenizer.push(token_id) for token_id in generated), detokenizer.flush()]


def one_shot(tokenizer: Tokenizer, prompt: Sequence[int], generated: Sequence[int]) -> str:
    """What decode(prompt + generated) has beyond decode(prompt)."""
    before, both = tokenizer.decode(prompt), tokenizer.decode([*prompt, *generated])
    return both[len(os.path.commonprefix([before, both])) :]  # noqa: RUF071 (character by character is meant)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def by_name(tokenizer: tokenizers.Tokenizer, *tokens: str) -> list[int]:
    found = [tokenizer.token_to_id(token) for token in tokens]
    assert None not in found
    return cast(list[int], found)


class TestSplitCharacters:
    """K07."""

    @pytest.mark.parametrize("cut", [1, 2, 3])
    def test_an_emoji_of_two_tokens(self, cut):
        emoji = "🙂".encode()
        backend = byte_level(emoji[:cut], emoji[cut:])
        tokens = ["".join(LETTERS[byte] for byte in piece) for piece in (emoji[:cut], emoji[cut:])]
        tokenizer = Tokenizer(backend)
        generated = [*ids(tokenizer, "a"), *by_name(backend, *tokens), *ids(tokenizer, "b")]
        assert stream(tokenizer, ids(tokenizer, "hi"), generated) == ["a", "", "🙂", "b", ""]

    @pytest.mark.parametrize("name", LOSSLESS)
    def test_no_half_character_in_mixed_scripts(self, name):
        tokenizer = ALL[name]
        pieces = stream(tokenizer, ids(tokenizer, "hello"), ids(tokenizer, MIXED)[1 if name == "llama" else 0 :])
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces).strip() == MIXED.strip()

    def test_no_half_character_in_a_longer_pipeline(self):
        """A decoder that is byte-level and something else besides (here: capitals for small letters)."""
        backend = byte_level()
        backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("e", "E")])
        tokenizer = Tokenizer(backend)
        pieces = stream(tokenizer, ids(tokenizer, "hello"), ids(tokenizer, MIXED))
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) == MIXED.replace("e", "E")

    def test_no_half_character_with_the_embedded_tokenizer(self, embedded):
        assert len(MIXED) > 1000
        generated = ids(embedded, MIXED)
        pieces = stream(embedded, ids(embedded, "hello"), generated)
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces).encode() == embedded.decode(generated).encode() == MIXED.encode()
        assert max(map(len, pieces)) < 10  # it streams: nothing waits for the end

    @pytest.mark.parametrize("name", LOSSLESS)
    @pytest.mark.parametrize("kept", [1, 2, 3])
    def test_an_answer_cut_inside_a_character_ends_as_decode_ends_it(self, name, kept):
        tokenizer = ALL[name]
        prompt = ids(tokenizer, "a")
        emoji = ids(tokenizer, "a🙂")[len(prompt) :]
        assert len(emoji) == 4
        pieces = stream(tokenizer, prompt, emoji[:kept])
        assert pieces[:-1] == [""] * kept
        assert pieces[-1] == one_shot(tokenizer, prompt, emoji[:kept])
        assert set(pieces[-1]) == {"\ufffd"}

    def test_a_replacement_character_that_is_meant_is_shown_at_once(self, embedded):
        pieces = stream(embedded, [], ids(embedded, "a\ufffd"))
        assert "".join(pieces[:-1]) == "a\ufffd"

    def test_a_wrong_byte_takes_its_whole_run_along(self):
        """The library's byte fallback reads a run of bytes as a whole, so a run is certain when it has ended."""
        backend = llama()
        tokenizer = Tokenizer(backend)
        good = [f"<0x{byte:02X}>" for byte in "你".encode()]
        generated = by_name(backend, "▁a", *good, "b", *good, "<0xFF>", "b")
        assert stream(tokenizer, [], generated) == ["a", "", "", "", "你b", "", "", "", "", "����b", ""]

    def test_added_tokens_stand_for_themselves(self):
        """Whether or not all their letters are in the byte alphabet (for "好的" and the space they are not)."""
        backend = byte_level()
        tokenizer = Tokenizer(backend)
        generated = by_name(backend, "<tool>", "two words", "a", "好的")
        assert stream(tokenizer, [], generated) == ["<tool>", "two words", "a", "好的", ""]
        assert tokenizer.decode(generated) == "<tool>two wordsa好的"

    def test_a_special_token_does_not_end_a_character(self):
        backend = byte_level()
        first, *rest = by_name(backend, *(LETTERS[byte] for byte in "🙂".encode()))
        assert stream(Tokenizer(backend), [], [first, *by_name(backend, "<s>"), *rest])[-2:] == ["🙂", ""]


class TestPromptInsideACharacter:
    """Prompts may be sent as token ids, so they can end anywhere."""

    @pytest.mark.parametrize("name", LOSSLESS)
    def test_the_answer_completes_it(self, name):
        tokenizer = ALL[name]
        tokens = ids(tokenizer, "a🙂 b")
        at = len(ids(tokenizer, "a")) + 2
        assert "".join(stream(tokenizer, tokens[:at], tokens[at:])) == "🙂 b"

    def test_the_answer_does_not_complete_it(self):
        tokenizer = ALL["byte-level"]
        prompt = ids(tokenizer, "a🙂")[:-1]
        assert stream(tokenizer, prompt, ids(tokenizer, "bc")) == ["b", "c", ""]  # the U+FFFD is the prompt's


class TestLeadingSpace:
    """K08."""

    @pytest.mark.parametrize("text", [" hello", " ", "  ", "\n", "\u3000", " .", "hello"])
    @pytest.mark.parametrize("prompt", ["hello", "hello ", "a\n"])
    def test_the_first_token_keeps_its_space(self, embedded, prompt, text):
        tokens = ids(embedded, text)
        assert "".join(stream(embedded, ids(embedded, prompt), tokens)) == text

    @pytest.mark.parametrize("family", ["llama", "gemma", "metaspace"])
    @pytest.mark.parametrize(
        ("tokens", "expected"),
        [(["▁a"], " a"), (["▁"], " "), (["▁", "▁a"], "  a"), (["▁▁", "a"], "  a"), (["a"], "a")],
    )
    def test_behind_a_prompt_a_space_is_a_space(self, family, tokens, expected):
        backend = FAMILIES[family]()
        pieces = stream(Tokenizer(backend), by_name(backend, "<s>", "▁he"), by_name(backend, *tokens))
        assert "".join(pieces) == expected
        assert pieces[-1] == ""  # nothing waits for the end

    @pytest.mark.parametrize("family", ["llama", "metaspace"])
    def test_a_prompt_without_text_leaves_the_tokenizers_own_prefix_space_out(self, family):
        backend = FAMILIES[family]()
        assert stream(Tokenizer(backend), by_name(backend, "<s>"), by_name(backend, "▁a", "▁b")) == ["a", " b", ""]

    def test_no_spurious_space_behind_a_control_token(self, embedded):
        prompt = embedded.apply_chat_template([{"role": "user", "content": "hi"}])
        end = ids(embedded, "<|im_end|>")
        for control in ([], end, [*end, *end]):
            assert "".join(stream(embedded, [*prompt, *control], ids(embedded, "Hello there"))) == "Hello there"

    @pytest.mark.parametrize("family", ["llama", "gemma", "metaspace"])
    def test_a_control_token_in_between_adds_and_takes_no_space(self, family):
        backend = FAMILIES[family]()
        prompt = by_name(backend, "▁he", "</s>", "<s>")
        generated = by_name(backend, "a", "</s>", "▁b", "<s>", "b")
        assert "".join(stream(Tokenizer(backend), prompt, generated)) == "a bb"


class TestAnyTokens:
    """Whatever the ids, streaming equals decoding at once, and what has been shown is never taken back."""

    @settings(deadline=None, max_examples=300)
    @given(st.data())
    def test_small_tokenizers(self, data):
        name = data.draw(st.sampled_from(sorted(ALL)))
        tokenizer = ALL[name]
        token = st.integers(0, tokenizer.vocab_size)  # one id too many: ids that do not exist show nothing
        runs = {"llama": BYTES, "gemma": BYTES}.get(name)
        if runs is not None:  # valid characters in byte tokens are too rare among random ids
            some = st.text(min_size=1, max_size=2).map(lambda text: ids(tokenizer, text))
            tokens = [t for run in data.draw(st.lists(st.one_of(some, token.map(lambda t: [t])))) for t in run]
        else:
            tokens = data.draw(st.lists(token, max_size=30))
        cut = data.draw(st.integers(0, len(tokens)))
        assert "".join(stream(tokenizer, tokens[:cut], tokens[cut:])) == one_shot(tokenizer, tokens[:cut], tokens[cut:])

    @settings(deadline=None, max_examples=300)
    @given(text=st.text(), prompt=st.text(max_size=5), cut=st.integers(0, 40))
    def test_any_text_with_the_embedded_tokenizer(self, embedded, text, prompt, cut):
        tokens = [*ids(embedded, prompt), *ids(embedded, text)]
        cut = min(cut, len(tokens))
        pieces = stream(embedded, tokens[:cut], tokens[cut:])
        assert "".join(pieces).encode() == one_shot(embedded, tokens[:cut], tokens[cut:]).encode()
        assert "".join(stream(embedded, [], tokens)) == embedded.decode(tokens)

    @settings(deadline=None, max_examples=300)
    @given(tokens=st.lists(st.integers(0, 49_152), max_size=30), cut=st.integers(0, 30))
    def test_any_ids_with_the_embedded_tokenizer(self, embedded, tokens, cut):
        prompt, generated = tokens[:cut], tokens[cut:]
        assert "".join(stream(embedded, prompt, generated)) == one_shot(embedded, prompt, generated)

    @settings(deadline=None, max_examples=1000)
    @given(content=st.lists(st.sampled_from(TELLING_BYTES), max_size=8), cut=st.integers(0, 8))
    @example(content=[0xED, 0xA0], cut=2)  # Python waits for a third byte of what can be no character
    @example(content=[0xED, 0xA0, 0x80], cut=2)
    def test_any_bytes(self, content, cut):
        """Right and wrong UTF-8 alike: Python's decoder and the library's agree on every U+FFFD."""
        tokenizer = ALL["byte-level"]
        tokens = [BYTE_IDS[byte] for byte in content]
        prompt, generated = tokens[:cut], tokens[cut:]
        assert "".join(stream(tokenizer, prompt, generated)) == one_shot(tokenizer, prompt, generated)


@pytest.mark.parametrize("family", ["llama", "metaspace"])
def test_the_cost_of_a_token_does_not_grow(family):
    """Tokens handed to `decode`, all pushes together: a few per token, with runs of bytes in between."""

    class Counting:
        def __init__(self, backend: tokenizers.Tokenizer) -> None:
            self.backend, self.num_decoded = backend, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.backend, name)

        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            self.num_decoded += len(token_ids)
            return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    counting = Counting(FAMILIES[family]())
    detokenizer = DetokenizerFactory(cast(tokenizers.Tokenizer, counting)).after([])
    tokens = counting.backend.encode("hello 🙂🙂🙂 ab " * 200).ids
    text = "".join(map(detokenizer.push, tokens)) + detokenizer.flush()
    assert text == counting.backend.decode(tokens)
    assert counting.num_decoded < 4 * len(tokens)
