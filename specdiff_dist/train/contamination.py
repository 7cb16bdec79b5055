"""Are evaluation prompts among the training prompts?"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

SHINGLE_WORDS = 13

_WORD = re.compile(r"\w+")


class EvaluationTexts:
    """The texts a drafter will be measured on, as what can be looked up."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._whole: set[str] = set()
        self._shingles: set[str] = set()
        for text in texts:
            words = normalised_words(text)
            if words:
                self._whole.add(" ".join(words))
            self._shingles.update(_shingles(words))

    def reason(self, text: str) -> str | None:
        """Why `text` may not be trained on: "exact", "shingle" (13 words in a row in common), or None."""
        words = normalised_words(text)
        if " ".join(words) in self._whole:
            return "exact"
        return None if self._shingles.isdisjoint(_shingles(words)) else "shingle"


def normalised_words(text: str) -> list[str]:
    """Words without case, punctuation, spacing and compatibility forms."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _shingles(words: list[str]) -> set[str]:
    return {" ".join(words[start : start + SHINGLE_WORDS]) for start in range(len(words) - SHINGLE_WORDS + 1)}
