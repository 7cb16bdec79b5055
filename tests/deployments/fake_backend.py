"""A backend that answers from a script, and a byte-level model in a real tokenizer folder: HTTP without Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import tokenizers
from fastapi import FastAPI
from tokenizers import decoders, models, pre_tokenizers, processors

from deployments.openai_api.app import build_api
from deployments.openai_api.backend import ServedModel, ServiceInfo
from specdiff_dist.config import TIERS, DecodeConfig
from specdiff_dist.text import Tokenizer
from specdiff_dist.types import DrafterInfo, GenerateRequest, Receipt, SamplingParams, TokenChunk

NAME = "bytes-1m"
MAX_MODEL_LEN = 128
BOS = "<s>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'assistant' and loop.first %}{{ raise_exception('assistant cannot begin') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB_SIZE = len(ALPHABET) + 1
BOS_ID = len(ALPHABET)
DRAFTER = DrafterInfo(
    "toy", VOCAB_SIZE, MAX_MODEL_LEN, 16, ("left_to_right", "max_prob", "entropy"), is_deterministic=False,
    reports_true_proposals=True,
)  # fmt: skip

Act = Callable[[], Awaitable[object]]
Script = Iterable[TokenChunk | Exception | Act]


def make_tokenizer(folder: Path, *, adds_bos: bool, chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """One token per byte, and <s>, which a plain prompt gets only if `adds_bos`."""
    backend = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate(ALPHABET)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BOS])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"bos_token": BOS}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


def make_model(folder: Path, *, adds_bos: bool = True, chat_template: str | None = CHAT_TEMPLATE) -> ServedModel:
    return ServedModel(
        name=NAME,
        tokenizer=make_tokenizer(folder, adds_bos=adds_bos, chat_template=chat_template),
        default_sampling=SamplingParams(0.7, 5, 0.9),
        has_chat_template=chat_template is not None,
        tiers=TIERS,
        default_tier="exact",
        created=1_700_000_000,
    )


def make_receipt(tier: str = "exact", config: DecodeConfig | None = None, **changes: Any) -> Receipt:
    values: dict[str, Any] = {
        "num_rounds": 2, "num_draft_tokens": 8, "num_accepted_tokens": 3, "acceptance_histogram": (0, 1, 1),
        "num_tokens": 5, "mean_tv": 0.01, "max_tv": 0.02, "total_tv": 0.05, "mean_kl": 0.001, "num_infinite_kl": 0,
        "exact": tier == "exact", "degraded": False, "verifier_rebuilds": 0,
    }  # fmt: skip
    return Receipt(tier=tier, config=config or TIERS[tier], **{**values, **changes})


HELLO: Script = (
    TokenChunk((72, 101, 108), "Hel"),
    TokenChunk((108,), ""),  # held back: no text yet
    TokenChunk((111,), "lo", "stop", make_receipt()),
)


class FakeBackend:
    """Plays `script` for every request: chunks are yielded, exceptions raised, functions awaited."""

    def __init__(self, script: Script = HELLO, *, drafter: DrafterInfo | None = DRAFTER) -> None:
        self.script = script
        self.drafter = drafter
        self.max_model_len = MAX_MODEL_LEN
        self.calls: list[tuple[GenerateRequest, DecodeConfig | None, str]] = []
        self.num_open = 0
        self.num_yielded = 0
        self.info_error: Exception | None = None

    @property
    def last(self) -> GenerateRequest:
        return self.calls[-1][0]

    async def info(self) -> ServiceInfo:
        if self.info_error is not None:
            raise self.info_error
        return ServiceInfo(self.max_model_len, VOCAB_SIZE + 7, self.drafter)  # padded, as real ones are

    async def generate(
        self, request: GenerateRequest, config: DecodeConfig | None, tier: str
    ) -> AsyncGenerator[TokenChunk, None]:
        self.calls.append((request, config, tier))
        self.num_open += 1
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, TokenChunk):
                    self.num_yielded += 1
                    yield step
                else:
                    await step()
        finally:
            await asyncio.sleep(0)  # as a real one, it has something to await when it is closed
            self.num_open -= 1


def client_for(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def api_client(backend: FakeBackend, model: ServedModel) -> httpx.AsyncClient:
    return client_for(build_api(backend, model))


def sse_events(body: str) -> list[Any]:
    """The events of a stream, "[DONE]" as a string. Fails on any line that is not `data: …` or empty."""
    events: list[Any] = []
    for line in body.split("\n"):
        if line:
            assert line.startswith("data: "), line
            data = line.removeprefix("data: ")
            events.append(data if data == "[DONE]" else json.loads(data))
    return events
