"""A validated body becomes what the backend decodes: token ids, sampling parameters, seeds, tier."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from uuid import uuid4

from deployments.openai_api.backend import ServedModel, ServiceInfo
from deployments.openai_api.errors import ApiError
from deployments.openai_api.prompts import PromptEncoder, check_token_ids, does_not_fit, too_long
from deployments.openai_api.quality import requested_quality
from deployments.openai_api.requests import ChatBody, CompletionBody, GenerationBody
from specdiff_dist.config import DecodeConfig
from specdiff_dist.core.logit_processing import LogitProcessing
from specdiff_dist.core.randomness import fresh_seed
from specdiff_dist.types import GenerateRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Generation:
    """One HTTP request, ready to decode. One GenerateRequest per choice."""

    request_id: str
    requests: tuple[GenerateRequest, ...]
    tier: str
    config: DecodeConfig | None  # None: the tier as it stands
    stream: bool
    include_usage: bool
    return_token_ids: bool
    warnings: tuple[str, ...]

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return self.requests[0].prompt_token_ids

    @property
    def has_logprobs(self) -> bool:
        return self.requests[0].num_logprobs is not None


def split_model(name: str | None, served: str) -> str | None:
    """The tier suffix of `served` or `served:tier`, None without one. Raises ApiError 404 for any other model.

    The name is only ever compared, never looked up anywhere.
    """
    if name is None or name == served:
        return None
    if name.startswith(f"{served}:"):
        return name.removeprefix(f"{served}:")
    raise unknown_model(name, served)


def unknown_model(name: str, served: str) -> ApiError:
    """OpenAI's refusal of a model that is not there."""
    message = f"The model {name[:120]!a} does not exist; this service has {served}"
    return ApiError(404, message, param="model", code="model_not_found")


async def prepare(
    body: ChatBody | CompletionBody,
    *,
    request_id: str,
    warnings: list[str],
    tier_header: str | None,
    model: ServedModel,
    info: ServiceInfo,
    encoder: PromptEncoder,
) -> Generation:
    """Tokenises and resolves `body`. Raises ApiError, InvalidRequest, InexactConfig."""
    suffix = split_model(body.model, model.name)
    sampling = _sampling(body, model.default_sampling)
    tier, config, ignored = requested_quality(
        body.quality, suffix=suffix, header=tier_header, model=model, drafter=info.drafter,
        greedy_draft=sampling.is_greedy, is_seeded=body.seed is not None,
    )  # fmt: skip
    vocab_size = min(info.vocab_size, model.tokenizer.vocab_size)  # the verifier's may be padded
    stop_token_ids = tuple(body.stop_token_ids or ())
    check_token_ids(stop_token_ids, vocab_size, param="stop_token_ids")
    processing = _processing(body, vocab_size)
    limit = info.max_model_len
    if isinstance(body, ChatBody):
        param = "messages"
        if not model.has_chat_template:
            raise ApiError(400, f"{model.name} has no chat template; use /v1/completions", param=param)
        prompt = await encoder.chat(body.messages, max_model_len=limit)
    else:
        param = "prompt"
        prompt = await encoder.completion(body.prompt, max_model_len=limit, vocab_size=vocab_size)
    max_tokens = _max_tokens(body, len(prompt), limit, param)
    seed = fresh_seed() if body.seed is None else body.seed
    count = body.n or 1
    requests = tuple(
        GenerateRequest(
            request_id=request_id if count == 1 else f"{request_id}-{index}",
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            seed=choice_seed(seed, index),
            max_tokens=max_tokens,
            stop=body.stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=bool(body.ignore_eos),
            processing=processing,
            num_logprobs=body.num_logprobs,
        )
        for index in range(count)
    )
    return Generation(
        request_id=request_id,
        requests=requests,
        tier=tier,
        config=None if config == model.tiers[tier] else config,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        return_token_ids=bool(body.return_token_ids),
        warnings=(*warnings, *ignored),
    )


def new_request_id(prefix: str) -> str:
    """An id that no other replica hands out either: it names the sessions on the replicas."""
    return f"{prefix}-{uuid4().hex}"


def choice_seed(seed: int, index: int) -> int:
    """Seed of choice `index`: the request's own for the first, so that n = 1 and n > 1 agree on it; int64."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _sampling(body: GenerationBody, default: SamplingParams) -> SamplingParams:
    top_k = default.top_k if body.top_k is None else max(body.top_k, 0)  # -1 is vLLM's "off"
    return SamplingParams(
        temperature=default.temperature if body.temperature is None else body.temperature,
        top_k=top_k,
        top_p=default.top_p if body.top_p is None else body.top_p,
        min_p=default.min_p if body.min_p is None else body.min_p,
    )


def _processing(body: GenerationBody, vocab_size: int) -> LogitProcessing | None:
    """What is to be done to the logits; None where all asks for nothing."""
    allowed = tuple(dict.fromkeys(body.allowed_token_ids or ()))
    check_token_ids(allowed, vocab_size, param="allowed_token_ids")
    check_token_ids(tuple(body.logit_bias), vocab_size, param="logit_bias")
    return LogitProcessing(
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        bias_token_ids=tuple(body.logit_bias),
        biases=tuple(body.logit_bias.values()),
        min_tokens=body.min_tokens or 0,
        allowed_token_ids=allowed,
    ).after(0)


def _max_tokens(body: GenerationBody, num_prompt: int, limit: int, param: str) -> int:
    """Tokens to generate at most; to the end of the context when the client sets no limit."""
    asked = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    if num_prompt >= limit:
        raise too_long(limit, num_prompt, param=param)
    if asked is None:
        return limit - num_prompt
    if num_prompt + asked > limit:
        raise does_not_fit(limit, num_prompt, asked, param=param)
    return asked
