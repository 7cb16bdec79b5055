"""OpenAI and vLLM parameters that this service knows but does not serve yet.

Their neutral values are accepted, since clients send them unasked; anything else is refused by name: a parameter that
changes the answer is never quietly ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

from deployments.openai_api.errors import ApiError

# Parameter → values that ask for nothing (null always does).
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

# Parameters that never change an answer.
HARMLESS = frozenset({
    "metadata", "parallel_tool_calls", "prompt_cache_key", "request_id", "safety_identifier", "service_tier", "store",
    "user",
})  # fmt: skip


def check_supported(fields: Mapping[str, object], *, where: str = "") -> None:
    """Raises ApiError 400 for the first parameter of `fields` that asks for something not served yet."""
    for name, neutral in NEUTRAL_VALUES.items():
        value = fields.get(name)
        if value is None or any(_same(value, accepted) for accepted in neutral):
            continue
        raise _refusal(f"{where}{name}")
    best_of, n = fields.get("best_of"), fields.get("n")
    if best_of is not None and not _same(best_of, 1 if n is None else n):
        raise _refusal(f"{where}best_of")


def _refusal(param: str) -> ApiError:
    return ApiError(400, f"{param} is not supported by this service yet; leave it out", param=param,
                    code="unsupported_parameter")  # fmt: skip


def _same(value: object, neutral: object) -> bool:
    """Equality as JSON sees it: false is not 0."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
