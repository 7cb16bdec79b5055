"""Prompts to token ids, off the event loop and with bounded work: a prompt 50 times too long costs no more than one
that is a few times too long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from deployments.openai_api.backend import PromptTokenizer
from deployments.openai_api.errors import ApiError
from deployments.openai_api.requests import Message

_PROBE_CHARS_PER_TOKEN = 8  # ordinary text has 3 to 5; only text denser than this is tokenised whole when it is long


class PromptEncoder:
    """Tokenises prompts of one model."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer
        # No text of more characters than this per allowed token can fit.
        self._max_token_chars = max(
            (len(tokenizer.decode([token], skip_special_tokens=False)) for token in range(tokenizer.vocab_size)),
            default=1,
        )

    async def chat(self, messages: Sequence[Message], *, max_model_len: int) -> list[int]:
        """Ids of a conversation with the header of the answer. Raises ApiError 400 (too long), InvalidRequest."""
        return await asyncio.to_thread(self._chat, messages, max_model_len)

    async def completion(self, prompt: str | list[int], *, max_model_len: int, vocab_size: int) -> list[int]:
        """Ids of a plain prompt, BOS included where the tokenizer adds one; ids are taken as they are.

        Raises ApiError 400: too long, or ids outside the vocabulary.
        """
        if isinstance(prompt, str):
            return await asyncio.to_thread(self._text, prompt, max_model_len)
        if len(prompt) > max_model_len:
            raise too_long(max_model_len, f"at least {max_model_len + 1}", param="prompt")
        check_token_ids(prompt, vocab_size, param="prompt")
        return prompt

    def _chat(self, messages: Sequence[Message], max_model_len: int) -> list[int]:
        # Every message costs the template at least one token.
        if len(messages) > max_model_len:
            raise too_long(max_model_len, f"at least {len(messages)}", param="messages")
        self._check_length("\n".join(message.content for message in messages), max_model_len, param="messages")
        return self._tokenizer.apply_chat_template([message.as_template_input for message in messages])

    def _text(self, text: str, max_model_len: int) -> list[int]:
        self._check_length(text, max_model_len, param="prompt")
        return self._tokenizer.encode(text, add_special_tokens=True)

    def _check_length(self, text: str, max_model_len: int, *, param: str) -> None:
        """Refuses text that is surely too long, from its length and from the tokens of its beginning."""
        if len(text) > max_model_len * self._max_token_chars:
            num_tokens = -(-len(text) // self._max_token_chars)
            raise too_long(max_model_len, f"at least {num_tokens}", param=param)
        probe_chars = max_model_len * _PROBE_CHARS_PER_TOKEN
        if len(text) <= probe_chars:
            return
        # Cut before the space of a word: there tokenizers split too, so these tokens are the whole text's first ones.
        cut = text.rfind(" ", 0, probe_chars)
        head = text[: cut if cut > 0 else probe_chars]
        num_tokens = len(self._tokenizer.encode(head, add_special_tokens=False))
        if num_tokens > max_model_len:
            raise too_long(max_model_len, f"at least {num_tokens}", param=param)


def check_token_ids(token_ids: Sequence[int], vocab_size: int, *, param: str) -> None:
    """Raises ApiError 400 for ids outside [0, vocab_size)."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise ApiError(400, f"{param}: token ids must be in [0, {vocab_size})", param=param, code="invalid_value")


def too_long(max_model_len: int, num_tokens: int | str, *, param: str) -> ApiError:
    """OpenAI's refusal of a prompt that fills the context by itself."""
    return ApiError(
        400,
        f"This model's maximum context length is {max_model_len} tokens. However, your {param} resulted in "
        f"{num_tokens} tokens. Please reduce the length of the {param}.",
        param=param,
        code="context_length_exceeded",
    )


def does_not_fit(max_model_len: int, num_prompt: int, max_tokens: int, *, param: str) -> ApiError:
    """OpenAI's refusal of a prompt that leaves less than max_tokens."""
    return ApiError(
        400,
        f"This model's maximum context length is {max_model_len} tokens. However, you requested "
        f"{num_prompt + max_tokens} tokens ({num_prompt} in the {param}, {max_tokens} in the completion). Please reduce "
        f"the length of the {param} or completion.",
        param=param,
        code="context_length_exceeded",
    )
