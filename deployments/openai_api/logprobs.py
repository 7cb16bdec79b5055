"""Logprobs as OpenAI writes them: one entry per token, in the order of the tokens.

A token's string is its text; of a token that is only a part of a character, its bytes written out, `\\xe2\\x82`, as OpenAI
does. Special tokens, the one that ends the answer among them, are reported by their name, so there are as many entries as
completion_tokens. A logprob of -inf is -9999.0, which JSON can say.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from specdiff_dist.core.logprobs import TokenLogprob

LOWEST = -9999.0

Json = dict[str, Any]


class TokenNames(Protocol):
    """What is asked of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class LogprobsWriter:
    """The logprobs of one choice, piece by piece."""

    def __init__(self, tokens: TokenNames, *, is_chat: bool) -> None:
        self._tokens, self._is_chat = tokens, is_chat
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0  # complete ones, of the answer so far

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Json | None:
        """`logprobs` of the next tokens; None where there are none."""
        if not token_ids:
            return None
        return self._chat(token_ids, logprobs) if self._is_chat else self._completion(token_ids, logprobs)

    def _chat(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Json:
        content = [
            self._entry(token_id, one.logprob)
            | {"top_logprobs": [self._entry(*top) for top in zip(one.top_token_ids, one.top_logprobs, strict=True)]}
            for token_id, one in zip(token_ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Json:
        data = self._tokens.token_bytes(token_id)
        return {"token": _readable(data), "logprob": _number(logprob), "bytes": list(data)}

    def _completion(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Json:
        """`top_logprobs` has the token itself too, where it is none of the most probable."""
        names = [self._name(token_id) for token_id in token_ids]
        tops = [
            {
                self._name(token_id): _number(logprob)
                for token_id, logprob in zip(one.top_token_ids, one.top_logprobs, strict=True)
            }
            | {name: _number(one.logprob)}
            for name, one in zip(names, logprobs, strict=True)
        ]
        return {
            "tokens": names,
            "token_logprobs": [_number(one.logprob) for one in logprobs],
            "top_logprobs": tops,
            "text_offset": [self._offset(token_id) for token_id in token_ids],
        }

    def _name(self, token_id: int) -> str:
        return _readable(self._tokens.token_bytes(token_id))

    def _offset(self, token_id: int) -> int:
        """Characters of the answer before the token; inside a character, those before that."""
        offset = self._num_characters
        if not self._tokens.is_special(token_id):
            self._num_characters += len(self._utf8.decode(self._tokens.token_bytes(token_id)))
        return offset


def _readable(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in data)


def _number(logprob: float) -> float:
    return max(logprob, LOWEST)
