"""Request bodies as pydantic models: strict JSON types, `null` means the default."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from deployments.openai_api.body import JsonBody
from deployments.openai_api.errors import ApiError
from deployments.openai_api.unsupported import HARMLESS, NEUTRAL_VALUES, check_supported
from specdiff_dist.core.logit_processing import MAX_BIAS
from specdiff_dist.core.logprobs import MAX_LOGPROBS

MAX_CHOICES = 16
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_WARNINGS = 8
_TOKEN_ID = re.compile("-?(0|[1-9][0-9]{0,18})")  # one spelling for each number

Role = Literal["system", "developer", "user", "assistant"]
Body = TypeVar("Body", bound="GenerationBody")


def _invalid(message: str) -> PydanticCustomError:
    # The message is a template argument: braces in it mean nothing.
    return PydanticCustomError("invalid_value", "{message}", {"message": message})


def _text(value: str) -> str:
    """A lone surrogate is legal JSON but no text; no tokenizer takes it."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _invalid("holds a lone surrogate escape, which is not valid Unicode text") from None
    return value


def _finite(value: object) -> object:
    """An integer too large for a float is refused like 1e309."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**300:
        raise _invalid("Input should be a finite number")
    return value


def _stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise _invalid("must be a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise _invalid(f"at most {MAX_STOP_STRINGS} stop strings, not {len(strings)}")
    if not all(strings):
        raise _invalid("a stop string is empty; leave it out instead")
    if any(len(text) > MAX_STOP_CHARS for text in strings):
        raise _invalid(f"a stop string is longer than {MAX_STOP_CHARS} characters")
    return tuple(_text(text) for text in strings)


def _content(value: object) -> str:
    """Message content: a string, or text parts, joined by newlines as vLLM does."""
    if isinstance(value, str):
        return _text(value)
    if not isinstance(value, list) or not value:
        raise _invalid("must be a string or a non-empty list of text parts")
    texts: list[str] = []
    for index, part in enumerate(value):
        if not isinstance(part, dict):
            raise _invalid(f"part {index} must be an object")
        if part.get("type") != "text":
            raise _invalid(f"part {index} is not of type 'text'; only text is supported")
        if not isinstance(part.get("text"), str):
            raise _invalid(f"part {index} must have a string 'text'")
        texts.append(_text(part["text"]))
    return "\n".join(texts)


def _prompt(value: object) -> str | list[int]:
    """A string, a list of token ids, or a list of one of either. Ids are range-checked where the vocabulary is known."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        if any(isinstance(item, str | list) for item in value):
            raise _invalid("several prompts in one request are not supported; send one request per prompt")
        if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return value
    raise _invalid("must be a string, a list of integer token ids, or a list of one string")


def _logit_bias(value: object) -> dict[int, float]:
    """Token ids are decimal strings, as JSON keys are. Ids are range-checked where the vocabulary is known."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _invalid("must be an object of token ids and biases")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not _TOKEN_ID.fullmatch(key):
            raise _invalid(f"{key[:20]!a} is not a token id")
        if not isinstance(bias, int | float) or isinstance(bias, bool) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise _invalid(f"the bias of token {key} must be a number from {-MAX_BIAS:g} to {MAX_BIAS:g}")
        biases[int(key)] = float(bias)
    return biases


def _false_is_none(value: object) -> object:
    """A client of the chat endpoint's habit: `false` asks for no logprobs there."""
    return None if value is False else value


Number = Annotated[float, BeforeValidator(_finite), Field(allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(_Strict):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis: never sent


class Message(_Strict):
    """One chat message. Fields of assistant messages that SDKs echo back are accepted while they are empty."""

    role: Role
    content: Annotated[Any, BeforeValidator(_content)]

    @property
    def as_template_input(self) -> dict[str, str]:
        """What the chat template sees; `developer` is OpenAI's newer name of `system`."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class GenerationBody(_Strict):
    """What both endpoints share."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: Number | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: Annotated[Any, BeforeValidator(_logit_bias)] = Field(default_factory=dict)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    allowed_token_ids: list[int] | None = None
    seed: Seed | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Annotated[Any, BeforeValidator(_stop)] = ()
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    quality: Any = None

    @property
    def num_logprobs(self) -> int | None:
        """Most probable tokens to report beside each token's own logprob; None: no logprobs."""
        raise NotImplementedError


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[Any, BeforeValidator(_prompt)]
    logprobs: Annotated[int | None, BeforeValidator(_false_is_none)] = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


_MESSAGE_NEUTRAL: dict[str, tuple[object, ...]] = {
    "annotations": ([],), "audio": (), "function_call": (), "refusal": (), "tool_call_id": (), "tool_calls": ([],),
}  # fmt: skip


def parse_body(model: type[Body], body: JsonBody) -> tuple[Body, list[str]]:
    """The validated body and warnings about what was ignored. Raises ApiError 400 naming the field."""
    check_supported(body.fields)
    try:
        parsed = model.model_validate(body.fields)
    except ValidationError as error:
        # Only the first fault, and never its input: that may be the prompt.
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = _path(fault["loc"])
        raise ApiError(400, f"{param}: {fault['msg']}", param=param, code="invalid_value") from None
    if body.has_non_finite:
        raise ApiError(400, "the request body holds NaN or an infinite number", code="invalid_value")
    if parsed.stream_options is not None and not parsed.stream:
        raise ApiError(400, "stream_options is only allowed with stream: true", param="stream_options",
                       code="invalid_value")  # fmt: skip
    limits = {parsed.max_tokens, parsed.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise ApiError(400, "max_tokens and max_completion_tokens contradict each other; give one of them",
                       param="max_tokens", code="invalid_value")  # fmt: skip
    if isinstance(parsed, ChatBody) and parsed.top_logprobs and not parsed.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    return parsed, _warnings(model, body.fields)


def _warnings(model: type[GenerationBody], fields: dict[str, Any]) -> list[str]:
    """Says what was ignored; refuses message fields that carry something not supported."""
    ignored = [name for name in fields if name not in model.model_fields and not _is_known(name)]
    options = fields.get("stream_options")
    if options:
        ignored += [f"stream_options.{name}" for name in options if name not in StreamOptions.model_fields]
    for index, message in enumerate(fields.get("messages") or []):
        for name, value in message.items():
            path = f"messages[{index}].{name}"
            if name in _MESSAGE_NEUTRAL:
                if value is not None and value not in _MESSAGE_NEUTRAL[name]:
                    raise ApiError(400, f"{path} is not supported by this service yet; leave it out", param=path,
                                   code="unsupported_parameter")  # fmt: skip
            elif name not in Message.model_fields and value is not None:
                ignored.append(path)
    # Header values are short ASCII; the names are the caller's own.
    return [f"unknown field {name[:60]!a} ignored" for name in ignored[:MAX_WARNINGS]]


def _is_known(name: str) -> bool:
    return name in NEUTRAL_VALUES or name in HARMLESS or name == "best_of"


def _path(loc: tuple[int | str, ...]) -> str:
    """`messages[0].content`, as OpenAI writes paths."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path
