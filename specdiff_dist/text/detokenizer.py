"""Token ids to text, one token at a time, never a partial character.

For any prompt and any generated ids, the joined pieces are what `decode(prompt + generated)` has beyond its longest
common prefix with `decode(prompt)`: every byte, the leading space included. Special tokens show no text.

Two families of tokenizers, told apart by the decoder in tokenizer.json:

- byte-level: a token is a fixed string of bytes, so an incremental UTF-8 decoder is all there is to it;
- any other (SentencePiece, Metaspace, WordPiece): a token's text depends on whether another one stands before it, so
  it is decoded behind the last token already shown. With byte fallback, a run of byte tokens is text only when it has
  ended: the library turns the *whole* run into U+FFFD if any byte of it is wrong, so nothing in it is certain before.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

import tokenizers

REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer(Protocol):
    """One answer being turned into text."""

    def push(self, token_id: int) -> str:
        """Takes the next token, returns the text that is now certain; "" while a character is incomplete."""
        ...

    def flush(self) -> str:
        """The rest at the end of the answer: what `decode` makes of an incomplete character."""
        ...


class DetokenizerFactory:
    """Knows what all answers of one tokenizer share."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
        self._kinds = [kind for kind in _kinds(decoder) if kind != "Fuse"]  # it joins, which we do anyway
        self._vocabulary = _Vocabulary(backend)

    def is_visible(self, token_id: int) -> bool:
        """Whether the token shows text."""
        return self._vocabulary.is_visible(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """See Tokenizer.token_bytes."""
        vocabulary = self._vocabulary
        if not vocabulary.is_visible(token_id):
            return vocabulary.name(token_id).encode()
        if "ByteLevel" in self._kinds:
            return vocabulary.byte_level(token_id)
        if "ByteFallback" in self._kinds and vocabulary.is_byte(token_id):
            return bytes([int(vocabulary.name(token_id)[3:5], 16)])
        return _beyond(vocabulary.decode([token_id]), vocabulary.decode([token_id, token_id])).encode()

    def after(self, prompt_token_ids: Sequence[int]) -> Detokenizer:
        """A detokenizer for the answer to this prompt."""
        if self._kinds == ["ByteLevel"]:
            return _ByteLevelDetokenizer(self._vocabulary, prompt_token_ids)
        return _ContextDetokenizer(
            self._vocabulary,
            prompt_token_ids,
            has_byte_fallback="ByteFallback" in self._kinds,
            has_byte_level="ByteLevel" in self._kinds,
        )


def _kinds(decoder: dict[str, Any]) -> list[str]:
    """The steps of a decoder by type, nested sequences unrolled."""
    if decoder.get("type") == "Sequence":
        return [kind for step in decoder["decoders"] for kind in _kinds(step)]
    return [decoder["type"]] if "type" in decoder else []


class _Vocabulary:
    """Facts about single tokens. Ids that are special or do not exist show no text: `decode` drops them first."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )

    def is_visible(self, token_id: int) -> bool:
        return token_id not in self._special_ids and self._backend.id_to_token(token_id) is not None

    def name(self, token_id: int) -> str:
        """As the vocabulary spells it; "" for ids that do not exist."""
        return self._backend.id_to_token(token_id) or ""

    def is_byte(self, token_id: int) -> bool:
        return BYTE_TOKEN.fullmatch(self.name(token_id)) is not None

    def byte_level(self, token_id: int) -> bytes:
        """Bytes of a visible token under a byte-level decoder. A token that is not written in the byte alphabet
        throughout (an added one with a space in it, say) stands for itself."""
        token = self.name(token_id)
        try:
            return bytes(_BYTES[character] for character in token)
        except KeyError:
            return token.encode()

    def decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=True)


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of the 256 bytes, as GPT-2 defined them."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_alphabet()


class _ByteLevelDetokenizer:
    def __init__(self, vocabulary: _Vocabulary, prompt_token_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # The prompt may end inside a character (its ids can be sent raw). At most the last three bytes are open, and a
        # UTF-8 decoder is in step again at any lead byte, so a short tail leaves it in the state of the whole prompt.
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if len(tail) >= 4:
                break
            if vocabulary.is_visible(token_id):
                tail = vocabulary.byte_level(token_id) + tail
        self._utf8.decode(tail)
        # decode(prompt) already shows the open bytes as U+FFFD: if they come to nothing, that is not ours.
        self._shown_by_prompt = self._utf8.getstate()[0].decode("utf-8", "replace")

    def push(self, token_id: int) -> str:
        if not self._vocabulary.is_visible(token_id):
            return ""
        return self._show(self._utf8.decode(self._vocabulary.byte_level(token_id)))

    def flush(self) -> str:
        return self._show(self._utf8.decode(b"", final=True))

    def _show(self, text: str) -> str:
        if text and self._shown_by_prompt:
            text, self._shown_by_prompt = _beyond(self._shown_by_prompt, text), ""
        return text


class _ContextDetokenizer:
    def __init__(
        self,
        vocabulary: _Vocabulary,
        prompt_token_ids: Sequence[int],
        *,
        has_byte_fallback: bool,
        has_byte_level: bool,
    ) -> None:
        self._vocabulary = vocabulary
        self._has_byte_fallback = has_byte_fallback
        self._has_byte_level = has_byte_level
        # Context: the last visible token before what is held back, and the run of byte tokens it may end in (only in
        # the prompt; a run in the answer is held back until it has ended).
        context: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if vocabulary.is_visible(token_id):
                context.append(token_id)
                if not (has_byte_fallback and vocabulary.is_byte(token_id)):
                    break
        self._set_context(context[::-1])
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        if not self._vocabulary.is_visible(token_id):
            return ""
        self._held.append(token_id)
        if self._has_byte_fallback and self._vocabulary.is_byte(token_id):
            return ""
        text = self._vocabulary.decode(self._context + self._held)
        if self._has_byte_level and text.endswith(REPLACEMENT):  # byte-level inside a longer pipeline
            return ""
        shown = _beyond(self._context_text, text)
        self._set_context([token_id])
        self._held = []
        return shown

    def flush(self) -> str:
        if not self._held:
            return ""
        text, self._held = self._vocabulary.decode(self._context + self._held), []
        return _beyond(self._context_text, text)

    def _set_context(self, token_ids: list[int]) -> None:
        self._context = token_ids
        self._context_text = self._vocabulary.decode(token_ids)


def _beyond(before: str, text: str) -> str:
    """`text` without its longest common prefix with `before`."""
    if text.startswith(before):
        return text[len(before) :]
    # Only where a prompt ends inside a character: the answer changes how its last bytes read.
    differs = (at for at, (old, new) in enumerate(zip(before, text, strict=False)) if old != new)
    return text[next(differs, len(text)) :]
