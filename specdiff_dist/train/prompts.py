"""Prompt files: JSON lines, in the forms that the usual data sets have."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdiff_dist.errors import InvalidRequest

_TEXT_KEYS = ("question", "prompt", "instruction")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the verifier is to answer."""

    messages: tuple[dict[str, str], ...]  # roles and contents; the last one is the user's
    later_turns: tuple[str, ...] = ()  # user messages of the file's item that are not asked here

    @property
    def user_texts(self) -> list[str]:
        """Every user message, the ones not asked here too."""
        return [message["content"] for message in self.messages if message["role"] == "user"] + list(self.later_turns)


@dataclass(frozen=True, slots=True)
class PromptFile:
    """One file, read."""

    name: str  # without its folder
    sha256: str
    prompts: tuple[Conversation, ...]


def read_prompt_file(path: Path) -> PromptFile:
    """Reads a file with one JSON object per line: "question", "prompt", "instruction" (and the input of its first
    instance, as in Self-Instruct), "turns" (the first is asked) or "messages".

    Raises InvalidRequest that names the file and the line.
    """
    try:
        content = path.read_bytes()
        lines = content.decode("utf-8").split("\n")
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not UTF-8 (byte {error.start}); convert it") from error
    prompts = tuple(_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip())
    if not prompts:
        raise InvalidRequest(f"{path} has no prompts; put one JSON object on each line")
    return PromptFile(path.name, hashlib.sha256(content).hexdigest(), prompts)


def _parse(line: str, where: str) -> Conversation:
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{where} is not JSON ({error.msg}); put one object on each line") from error
    if not isinstance(item, dict):
        raise InvalidRequest(f"{where} is no JSON object")
    if "messages" in item:
        return _from_messages(item["messages"], where)
    if "turns" in item:
        turns = item["turns"]
        if (
            not isinstance(turns, list)
            or not turns
            or not all(isinstance(turn, str) and turn.strip() for turn in turns)
        ):
            raise InvalidRequest(f'{where}: "turns" must be a list of texts')
        return Conversation(_user(turns[0]), tuple(turns[1:]))
    for key in _TEXT_KEYS:
        if key in item:
            text = item[key]
            if not isinstance(text, str) or not text.strip():
                raise InvalidRequest(f'{where}: "{key}" must be a text that is not empty')
            return Conversation(_user(text + _first_input(item) if key == "instruction" else text))
    raise InvalidRequest(f'{where} has no "question", "prompt", "instruction", "turns" or "messages"')


def _user(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


def _first_input(item: dict[str, Any]) -> str:
    instances = item.get("instances")
    first = instances[0] if isinstance(instances, list) and instances else None
    text = first.get("input") if isinstance(first, dict) else None
    return f"\n\n{text}" if isinstance(text, str) and text.strip() else ""


def _from_messages(messages: Any, where: str) -> Conversation:
    """The conversation up to its last user message: an answer that the file brings is left out."""
    if not isinstance(messages, list):
        raise InvalidRequest(f'{where}: "messages" must be a list')
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise InvalidRequest(f'{where}: every message needs a "role" and a "content" text')
    kept = [{"role": message["role"], "content": message["content"]} for message in messages]
    while kept and kept[-1]["role"] != "user":
        kept.pop()
    if not kept:
        raise InvalidRequest(f'{where}: "messages" has no message of the user')
    return Conversation(tuple(kept))
