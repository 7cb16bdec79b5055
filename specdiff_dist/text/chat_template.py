"""Chat templates, rendered as transformers renders them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdiff_dist.errors import InvalidRequest, ModelUnavailable


class ChatTemplate:
    """Renders messages to the text a chat model was trained on."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: what the template may name, for example {"bos_token": "<s>"}.

        Raises ModelUnavailable when the template is no valid Jinja.
        """
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ModelUnavailable(
                f"the model's chat template is no valid Jinja (line {error.lineno}: {error.message}); "
                "repair chat_template in the model folder"
            ) from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text, with the header that makes the model answer.

        Raises InvalidRequest in the template's own words, with the roles sent, when it refuses the messages.
        """
        # A template tests `is defined`; OpenAI clients send null for what is absent.
        shown = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return self._template.render(
                messages=shown, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise InvalidRequest(
                f"the model's chat template refuses these messages (roles: {roles}): {error}", param="messages"
            ) from error


class _GenerationBlocks(Extension):
    """`{% generation %}` marks the assistant's words for training; when serving it shows its body."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        # A scope: what the block sets does not leak out, as in transformers.
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own tojson escapes HTML, which no chat model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment
