"""Prompts from JSON-lines files: one object per line, with "messages", "prompt", "question" or "turns"."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdiff_dist.errors import InvalidRequest


def read_prompt_file(path: Path, limit: int | None = None) -> list[str | Sequence[Mapping[str, Any]]]:
    """The first `limit` prompts (None: all), each a user's message or chat messages. Of several "turns" the first.

    Raises InvalidRequest naming the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: U+2028 may stand in a JSON string
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidRequest(f"cannot read {path}: {reason}; check the path") from error
    numbered = list(enumerate(filter(str.strip, lines), 1))[:limit]
    return [_prompt_of(line, f"{path}, object {number}") for number, line in numbered]


def _prompt_of(line: str, where: str) -> str | Sequence[Mapping[str, Any]]:
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{where} is not JSON ({error.msg}); put one object on each line") from error
    if isinstance(item, dict):
        for key in ("messages", "prompt", "question"):
            if isinstance(item.get(key), list if key == "messages" else str):
                return item[key]
        turns = item.get("turns")
        if isinstance(turns, list) and turns and isinstance(turns[0], str):
            return turns[0]
    raise InvalidRequest(f'{where} has no "prompt" or "question" text and no "messages" or "turns" list')
