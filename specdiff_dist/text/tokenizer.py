"""The tokenizer of a model folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from specdiff_dist.errors import InvalidRequest, ModelUnavailable
from specdiff_dist.models.files import read_chat_template, read_json
from specdiff_dist.text.chat_template import ChatTemplate
from specdiff_dist.text.detokenizer import Detokenizer, DetokenizerFactory


class Tokenizer:
    """Text to token ids and back, equal to transformers' fast tokenizer of the same folder. Thread-safe."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: ChatTemplate | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
    ) -> None:
        backend.no_truncation()  # some folders carry the settings of a training run
        backend.no_padding()
        self._backend = backend
        self._chat_template = chat_template
        self._detokenizers = DetokenizerFactory(backend)
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """Ids that exist are < vocab_size. The model's own `vocab_size` may be padded beyond it."""

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json, chat_template.jinja, config.json.

        Raises ModelUnavailable when tokenizer.json is missing or no file of the `tokenizers` library.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelUnavailable(
                f"{folder} has no tokenizer.json; load it once with transformers' AutoTokenizer and save_pretrained() it"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception on malformed files
            raise ModelUnavailable(f"{file} cannot be read ({error}); fetch the model again") from error
        names = _special_tokens(folder)
        source = read_chat_template(folder)
        config = read_json(folder / "config.json")
        return cls(
            backend,
            chat_template=None if source is None else ChatTemplate(source, names),
            bos_token_id=_token_id(backend, names.get("bos_token"), config.get("bos_token_id")),
            eos_token_id=_token_id(backend, names.get("eos_token"), config.get("eos_token_id")),
        )

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; special tokens written out in it become their ids.

        `add_special_tokens`: also what the tokenizer itself puts around a text, BOS mostly.
        Raises InvalidRequest on text that is not valid Unicode (a lone surrogate).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the text is not valid Unicode: {error.reason} at {error.start}") from error
        # (`encode` would hold the interpreter's lock; a long prompt must not stall other requests)
        return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids; incomplete characters become U+FFFD. Spaces are never tidied up."""
        return self._backend.decode([int(token_id) for token_id in token_ids], skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token as it reads behind others; perhaps a part of a character. A special token's are its
        name's, though it shows no text; b"" for ids that are no token."""
        return self._detokenizers.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether the token shows no text: special ones, and ids that are no token."""
        return not self._detokenizers.is_visible(token_id)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, ending in the header of the assistant's turn. `content` is a string.

        The template alone decides about BOS: whatever the tokenizer would add by itself is left out, so there is one
        and not two. Raises InvalidRequest when there is no template or it refuses the messages.
        """
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of what `apply_chat_template` encodes. Raises InvalidRequest as it does."""
        if self._chat_template is None:
            raise InvalidRequest(
                "this model has no chat template; send a plain prompt to /v1/completions", param="messages"
            )
        return self._chat_template.render(messages)

    def detokenizer(self, prompt_token_ids: Sequence[int]) -> Detokenizer:
        """Turns the tokens generated after the prompt into text, one by one."""
        return self._detokenizers.after(prompt_token_ids)


def _special_tokens(folder: Path) -> dict[str, str]:
    """{"bos_token": "<s>", …} as templates see it."""
    named: dict[str, str] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        for key, value in read_json(folder / name).items():
            content = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(content, str):
                named.setdefault(key, content)
    return named


def _token_id(backend: tokenizers.Tokenizer, token: str | None, configured: object) -> int | None:
    if token is not None:
        return backend.token_to_id(token)
    if isinstance(configured, list):
        configured = configured[0] if configured else None
    return configured if isinstance(configured, int) else None
