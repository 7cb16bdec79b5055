"""Where a user's turn starts and ends in a chat template, found by rendering one."""

from __future__ import annotations

from dataclasses import dataclass

from specdiff_dist.errors import InvalidConfig
from specdiff_dist.text import Tokenizer

_CONTENT = "CONTENT5cb1"  # letters and digits only: no template changes them


@dataclass(frozen=True, slots=True)
class UserTurn:
    """What stands around a user's words. A verifier given only the opening writes a prompt of its own."""

    opening: tuple[int, ...]  # token ids up to where the user's words start
    end_token_id: int  # the token that follows them

    @staticmethod
    def of(tokenizer: Tokenizer) -> UserTurn:
        """Raises InvalidConfig when the model has no chat template, or one that changes what users say."""
        if not tokenizer.has_chat_template:
            raise InvalidConfig("this verifier has no chat template and cannot write prompts; set --self-written 0")
        rendered = tokenizer.render_chat([{"role": "user", "content": _CONTENT}])
        before, content, after = rendered.partition(_CONTENT)
        opening = tokenizer.encode(before, add_special_tokens=False)
        ending = tokenizer.encode(after, add_special_tokens=False)
        if not content or not opening or not ending:
            raise InvalidConfig("the chat template does not frame the user's words; set --self-written 0")
        return UserTurn(tuple(opening), ending[0])
