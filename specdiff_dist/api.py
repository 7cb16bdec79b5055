"""A drafter and a verifier in this process, behind one object.

    with load_pair("smollm2-135m", drafter="combined") as pair:
        completion = pair.generate("Why is the sky blue?", tier="balanced", max_tokens=64)
        for chunk in pair.stream([{"role": "user", "content": "And at night?"}]):
            print(chunk.text, end="")

It runs the same round loop as the server (specdiff_dist/engine) over local roles.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

from specdiff_dist.config import DEFAULT_TIER, TIERS, DecodeConfig
from specdiff_dist.core.features import check_features
from specdiff_dist.core.logit_processing import LogitProcessing
from specdiff_dist.core.logprobs import TokenLogprob
from specdiff_dist.core.pair_knowledge import PairKnowledge
from specdiff_dist.core.randomness import fresh_seed
from specdiff_dist.drafters import load_drafter, split_name, with_copying
from specdiff_dist.drafters.combined import combined_info
from specdiff_dist.engine import decode
from specdiff_dist.errors import InvalidRequest
from specdiff_dist.models import ModelFolder, resolve
from specdiff_dist.quality import resolve_quality
from specdiff_dist.receipts import usage_report
from specdiff_dist.roles import Drafter, DrafterEngine, VerifierEngine
from specdiff_dist.simulate.trace import RoundTrace
from specdiff_dist.text.tokenizer import Tokenizer
from specdiff_dist.transport.local import LocalDrafter, LocalVerifier
from specdiff_dist.types import GenerateRequest, Receipt, RoundRecord, SamplingParams, TokenChunk

Prompt = str | Sequence[Mapping[str, Any]]


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate`, `stream` and `astream`. What is left out comes from the model's defaults."""

    tier: str  # "exact" (default), "high", "balanced", "fast", "turbo"
    quality: Mapping[str, Any]  # overrides parts of the tier's configuration: the object of the HTTP field `quality`
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    frequency_penalty: float  # this and what follows: core/logit_processing.py
    presence_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    min_tokens: int
    allowed_token_ids: Sequence[int]
    logprobs: int  # of every token, and of so many of the most probable ones beside it
    max_tokens: int  # default: to the end of the context
    seed: int  # default: a fresh one
    stop: str | Sequence[str]
    ignore_eos: bool
    raw: bool  # a str prompt is continued as it is instead of being put as a user's message


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer. `token_ids` include the EOS token; `text` does not, nor a stop string."""

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: str  # "stop" | "length"
    receipt: Receipt
    rounds: tuple[RoundRecord, ...]
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token, if asked for

    @property
    def usage(self) -> dict[str, int]:
        """Token counts, named as OpenAI's."""
        return usage_report(len(self.prompt_token_ids), len(self.token_ids))


class Pair:
    """A drafter (or none) and a verifier of one vocabulary. Made by `load_pair`; close it, or use it in a `with`."""

    def __init__(
        self,
        folder: ModelFolder,
        tokenizer: Tokenizer,
        drafter: DrafterEngine | None,
        verifier: VerifierEngine,
        *,
        copies: bool = False,
    ) -> None:
        """`copies`: rounds copy instead of asking the drafter where that pays more (drafters/combined.py)."""
        self.folder = folder
        self.tokenizer = tokenizer
        self.drafter = None if drafter is None else LocalDrafter(drafter)  # whose engine runs here
        self.verifier = LocalVerifier(verifier)
        self._drafter: Drafter | None = self.drafter  # that the round loop asks
        self.drafter_info = None if drafter is None else drafter.info  # of that one
        if self.drafter is not None and self.drafter_info is not None and copies:
            self._drafter = with_copying(self.drafter, verifier.info)
            self.drafter_info = combined_info(self.drafter_info)
        self._knowledge = PairKnowledge()  # what speculation policies learn, from all calls
        self._trace: list[list[RoundTrace]] | None = None
        self._runner = asyncio.Runner()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer. `prompt`: a user's message, or chat messages with `role` and `content`.

        Raises InvalidRequest and InvalidConfig for what cannot be served; see `GenerateOptions`.
        """
        request, config, tier = self.prepare(prompt, **options)
        return collect(request, list(self._run(request, config, tier)))

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generator[TokenChunk, None, None]:
        """The answer round by round; the last chunk carries `finish_reason` and `receipt`. Raises as `generate`."""
        return self._run(*self.prepare(prompt, **options))

    def astream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncGenerator[TokenChunk, None]:
        """`stream` for callers with an event loop of their own."""
        return self._decode(*self.prepare(prompt, **options))

    def prepare(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> tuple[GenerateRequest, DecodeConfig, str]:
        """Request, configuration and tier that a prompt and options stand for. Raises as `generate`."""
        request = make_request(self.folder, self.tokenizer, prompt, **options)
        tier, config = resolve_quality(
            _quality(options.get("tier"), options.get("quality")),
            default_tier=DEFAULT_TIER,
            tiers=TIERS,
            drafter=self.drafter_info,
            greedy_draft=request.sampling.is_greedy,
            is_seeded=options.get("seed") is not None,
        )
        return request, config, tier

    @contextmanager
    def recording(self) -> Iterator[list[list[RoundTrace]]]:
        """While it lasts, every request's rounds are added to the list given: a trace for `specdiff simulate`."""
        self._trace = []
        try:
            yield self._trace
        finally:
            self._trace = None

    def close(self) -> None:
        """Stops the threads of both models and the event loop behind `generate` and `stream`."""
        self._runner.run(self._close_roles())
        self._runner.close()

    async def _close_roles(self) -> None:
        await self.verifier.close()
        if self.drafter is not None:
            await self.drafter.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _decode(self, request: GenerateRequest, config: DecodeConfig, tier: str) -> AsyncGenerator[TokenChunk, None]:
        detokenizer = self.tokenizer.detokenizer(request.prompt_token_ids)
        recorder = None
        if self._trace is not None:
            rounds: list[RoundTrace] = []
            self._trace.append(rounds)
            recorder = rounds.append
        return decode(
            request,
            config,
            self._drafter,
            self.verifier,
            tier=tier,
            detokenizer=detokenizer,
            knowledge=self._knowledge.for_session(config, self.drafter_info, is_greedy=request.sampling.is_greedy),
            recorder=recorder,
        )

    def _run(self, request: GenerateRequest, config: DecodeConfig, tier: str) -> Generator[TokenChunk, None, None]:
        """Steps the asynchronous loop from synchronous code; closing the iterator early frees the session."""
        chunks = self._decode(request, config, tier)
        try:
            while True:
                chunk = self._runner.run(_next(chunks))
                if chunk is None:
                    return
                yield chunk
        finally:
            self._runner.run(chunks.aclose())


def _quality(tier: str | None, overrides: Mapping[str, Any] | None) -> str | Mapping[str, Any] | None:
    """One `quality` value out of the two options."""
    if overrides is None or tier is None:
        return tier if overrides is None else overrides
    if overrides.get("tier", tier) != tier:
        raise InvalidRequest(
            f"tier {tier!r} and quality.tier {overrides['tier']!r} contradict each other", param="tier"
        )
    return {**overrides, "tier": tier}


async def _next(chunks: AsyncGenerator[TokenChunk, None]) -> TokenChunk | None:
    return await anext(chunks, None)


def make_request(
    folder: ModelFolder, tokenizer: Tokenizer, prompt: Prompt, **options: Unpack[GenerateOptions]
) -> GenerateRequest:
    """The request that a prompt and options stand for (all but tier and quality). Raises InvalidRequest."""
    token_ids = tokenize(tokenizer, prompt, raw=options.get("raw", False))
    defaults = folder.default_sampling
    stop = options.get("stop", ())
    return GenerateRequest(
        request_id=uuid.uuid4().hex,
        prompt_token_ids=tuple(token_ids),
        sampling=SamplingParams(
            options.get("temperature", defaults.temperature),
            options.get("top_k", defaults.top_k),
            options.get("top_p", defaults.top_p),
            options.get("min_p", defaults.min_p),
        ),
        seed=options.get("seed", fresh_seed()),
        max_tokens=options.get("max_tokens", max(folder.max_model_len - len(token_ids), 1)),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        ignore_eos=options.get("ignore_eos", False),
        processing=_processing(options),
        num_logprobs=options.get("logprobs"),
    )


def _processing(options: GenerateOptions) -> LogitProcessing | None:
    penalties = (options.get("frequency_penalty", 0.0), options.get("presence_penalty", 0.0))
    biases, allowed = options.get("logit_bias", {}), tuple(dict.fromkeys(options.get("allowed_token_ids", ())))
    return LogitProcessing(
        *penalties, options.get("repetition_penalty", 1.0), tuple(biases), tuple(biases.values()),
        options.get("min_tokens", 0), allowed,
    ).after(0)  # fmt: skip


def tokenize(tokenizer: Tokenizer, prompt: Prompt, *, raw: bool = False) -> list[int]:
    """Token ids of a prompt: through the chat template, unless it is a str and `raw` or the model has none."""
    if isinstance(prompt, str):
        if raw or not tokenizer.has_chat_template:
            return tokenizer.encode(prompt, add_special_tokens=True)
        prompt = [{"role": "user", "content": prompt}]
    if raw:
        raise InvalidRequest("raw needs a text prompt; chat messages always go through the template", param="raw")
    return tokenizer.apply_chat_template([dict(message) for message in prompt])


def collect(request: GenerateRequest, chunks: Sequence[TokenChunk]) -> Completion:
    """The completion that a finished stream of chunks makes up."""
    last = chunks[-1]
    if last.finish_reason is None or last.receipt is None:
        raise ValueError("the stream has not ended: its last chunk has no finish_reason")
    return Completion(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        prompt_token_ids=request.prompt_token_ids,
        finish_reason=last.finish_reason,
        receipt=last.receipt,
        rounds=tuple(record for chunk in chunks for record in chunk.rounds),
        logprobs=tuple(one for chunk in chunks for one in chunk.logprobs),
    )


def load_pair(
    model: str = "smollm2-135m",
    *,
    drafter: str | None = "combined",
    dtype: str = "auto",
    drafter_dtype: str = "auto",
    device: str = "auto",
    num_threads: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Pair:
    """Loads a verifier and its drafter into this process.

    Args:
        model: a known name (`specdiff models`), a local folder or a hub id.
        drafter: "combined" (copying where the text repeats, diffusion elsewhere), "diffusion", "prompt-lookup", a folder with
            weights, or None for plain decoding.
        dtype: "auto", "float32", "bfloat16" or "int4", of the verifier.
        drafter_dtype: also "int8", on a CPU; it changes what is drafted and how fast, never the law of the answer.
        device: "auto", "cpu", "cuda", "cuda:1" …
        num_threads: CPU threads of the models; None leaves PyTorch's choice.
        progress: told in words what takes long: the first use of a model fetches and converts it.

    Raises ModelUnavailable with the next step when weights cannot be had; InvalidConfig for unknown names, and
    for a drafter that needs features this verifier does not give.
    """
    from specdiff_dist.verifiers import load_verifier  # torch: only the process that runs the models pays for it

    folder = resolve(model, progress=progress)
    verifier = load_verifier(model, dtype=dtype, device=device, num_threads=num_threads)
    tokenizer = Tokenizer.load(folder.path)
    if drafter is None:
        return Pair(folder, tokenizer, None, verifier)
    name, copies = split_name(drafter)
    engine = load_drafter(name, verifier=model, dtype=drafter_dtype, device=device, num_threads=num_threads)
    check_features(engine.info, verifier.info)
    return Pair(folder, tokenizer, engine, verifier, copies=copies)
