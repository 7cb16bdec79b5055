"""Where an answer ends: EOS, stop token ids, stop strings and max_tokens, inside accepted blocks as anywhere.

Tokens are fed one by one in the order they were committed, so a stop inside a block drops the rest of the block.
"""

from __future__ import annotations

from typing import Protocol

from specdiff_dist.types import GenerateRequest


class Detokenizer(Protocol):
    """Incremental detokeniser of one answer (specdiff_dist/text)."""

    def push(self, token_id: int) -> str:
        """Text that is now certain."""
        ...

    def flush(self) -> str:
        """The rest, at the end."""
        ...


class StopMonitor:
    """Turns committed tokens into text and says when to stop. `finish_reason` is None until the answer has ended."""

    def __init__(
        self, request: GenerateRequest, eos_token_ids: tuple[int, ...], detokenizer: Detokenizer | None
    ) -> None:
        self._eos_ids = frozenset() if request.ignore_eos else frozenset(eos_token_ids)
        self._stop_ids = frozenset(request.stop_token_ids) | self._eos_ids
        self._stop_strings = request.stop
        self._max_tokens = request.max_tokens
        self._min_tokens = 0 if request.processing is None else request.processing.min_tokens
        self._detokenizer = detokenizer
        self._held = ""  # text that may be the beginning of a stop string: not shown yet
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def push(self, token_id: int) -> str:
        """Takes one token, returns the text to show. The order of tests matters: a stop that completes with the last
        allowed token is a stop, not a length."""
        self.num_tokens += 1
        text = ""
        if self._detokenizer is not None and token_id not in self._eos_ids:  # EOS is no text, special or not
            text = self._show(self._detokenizer.push(token_id))
        if self.finish_reason is None:
            if token_id in self._stop_ids and self._may_end:
                self.finish_reason = "stop"
            elif self.num_tokens >= self._max_tokens:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                text += self._rest()
        return text

    @property
    def ending_token_ids(self) -> tuple[int, ...]:
        """What ends the answer, ascending."""
        return tuple(sorted(self._stop_ids))

    @property
    def _may_end(self) -> bool:
        """Whether the last token is one after `min_tokens`. What would have stopped before is text like any other."""
        return self.num_tokens > self._min_tokens

    def _show(self, new_text: str) -> str:
        """Appends text; shows all but a tail that could still grow into a stop string."""
        if not self._stop_strings:
            return new_text
        text = self._held + new_text
        at = min((found for stop in self._stop_strings if (found := text.find(stop)) >= 0), default=-1)
        if at >= 0 and self._may_end:
            self.finish_reason, self._held = "stop", ""
            return text[:at]
        hold = max(_overlap(text, stop) for stop in self._stop_strings)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def _rest(self) -> str:
        """What is left when no stop string can complete any more."""
        text = self._show(self._detokenizer.flush()) if self._detokenizer else ""
        if self._held:  # the flushed text did not complete a stop string
            text, self._held = text + self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
