"""OpenAI response objects, whole and in pieces.

The receipt rides along as `metrics.speculative_decoding` and `quality`: at the top of a whole response, in the choice
when there are several, and at the top of a stream's last chunk of a choice (the empty delta with finish_reason).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import time
from typing import Any

from deployments.openai_api.backend import ServedModel
from deployments.openai_api.choices import Choice
from deployments.openai_api.generation import Generation
from deployments.openai_api.logprobs import LogprobsWriter
from specdiff_dist.receipts import quality_report, speculative_decoding_metrics, usage_report
from specdiff_dist.types import Receipt

Json = dict[str, Any]


def usage_of(generation: Generation, num_completion_tokens: int) -> Json:
    """`usage` of the request: the prompt once, the tokens of all choices."""
    return dict(usage_report(len(generation.prompt_token_ids), num_completion_tokens))


def receipt_fields(receipt: Receipt | None) -> Json:
    """What a receipt adds to a response."""
    if receipt is None:
        return {}
    return {
        "metrics": {"speculative_decoding": speculative_decoding_metrics(receipt)},
        "quality": quality_report(receipt),
    }


@dataclass(frozen=True, slots=True)
class Shape:
    """How one endpoint spells its objects."""

    object: str
    chunk_object: str
    is_chat: bool

    def whole(self, generation: Generation, model: ServedModel, choices: Sequence[Choice]) -> Json:
        """The response of a request that does not stream."""
        several = len(choices) > 1
        response = _envelope(generation, model.name, self.object)
        response["choices"] = [
            self._choice(generation, index, choice, self.logprobs(generation, model))
            | (receipt_fields(choice.receipt) if several else {})
            for index, choice in enumerate(choices)
        ]
        response["usage"] = usage_of(generation, sum(len(choice.token_ids) for choice in choices))
        return response if several else response | receipt_fields(choices[0].receipt)

    def logprobs(self, generation: Generation, model: ServedModel) -> LogprobsWriter | None:
        """A writer for one choice, if logprobs were asked for."""
        return LogprobsWriter(model.tokenizer, is_chat=self.is_chat) if generation.has_logprobs else None

    def _choice(self, generation: Generation, index: int, choice: Choice, logprobs: LogprobsWriter | None) -> Json:
        body: Json = {"index": index}
        if self.is_chat:
            body["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            body["text"] = choice.text
        body |= {"logprobs": _written(logprobs, choice), "finish_reason": choice.finish_reason}
        if generation.return_token_ids:
            body |= {"token_ids": choice.token_ids, "prompt_token_ids": list(generation.prompt_token_ids)}
        return body


CHAT = Shape("chat.completion", "chat.completion.chunk", is_chat=True)
COMPLETION = Shape("text_completion", "text_completion", is_chat=False)


class ChunkWriter:
    """Builds the chunks of one streamed response."""

    def __init__(self, shape: Shape, generation: Generation, model: ServedModel) -> None:
        self._shape = shape
        self._generation = generation
        self._envelope = _envelope(generation, model.name, shape.chunk_object)
        self._logprobs = [shape.logprobs(generation, model) for _ in generation.requests]

    def start(self, index: int) -> Json | None:
        """The chunk that opens a choice: the role, in a chat."""
        return self._chunk(index, {"role": "assistant", "content": ""}, Choice()) if self._shape.is_chat else None

    def text(self, index: int, piece: Choice) -> Json:
        """A piece of a choice's text."""
        return self._chunk(index, {"content": piece.text}, piece)

    def finish(self, index: int, finish_reason: str, piece: Choice, receipt: Receipt | None) -> Json:
        """The chunk that closes a choice: no text, the reason and the receipt. The tokens of `piece` showed no text."""
        chunk = self._chunk(index, {}, piece)
        chunk["choices"][0]["finish_reason"] = finish_reason
        return chunk | receipt_fields(receipt)

    def usage(self, num_completion_tokens: int) -> Json:
        """The chunk after the last choice, when the client asked for it."""
        return self._envelope | {"choices": [], "usage": usage_of(self._generation, num_completion_tokens)}

    def _chunk(self, index: int, delta: Json, piece: Choice) -> Json:
        choice: Json = {"index": index}
        if self._shape.is_chat:
            choice["delta"] = delta
        else:
            choice["text"] = piece.text
        choice |= {"logprobs": _written(self._logprobs[index], piece), "finish_reason": None}
        if self._generation.return_token_ids:
            choice["token_ids"] = piece.token_ids
        chunk = self._envelope | {"choices": [choice]}
        if self._generation.include_usage:
            chunk["usage"] = None  # as OpenAI does in all chunks but the last
        return chunk


def _written(logprobs: LogprobsWriter | None, piece: Choice) -> Json | None:
    return None if logprobs is None else logprobs.write(piece.token_ids, piece.logprobs)


def _envelope(generation: Generation, model: str, kind: str) -> Json:
    return {"id": generation.request_id, "object": kind, "created": int(time()), "model": model}
