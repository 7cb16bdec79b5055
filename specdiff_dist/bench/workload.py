"""What a measurement asks for, and how it is asked in this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdiff_dist.config import TIERS
from specdiff_dist.core.speculation import MeasuredLibraSpec
from specdiff_dist.quality import SETTLED, check_tier
from specdiff_dist.types import RoundRecord

if TYPE_CHECKING:
    from specdiff_dist.api import GenerateOptions


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests sent one at a time. They run to `max_tokens`, so that every run does the same work."""

    prompts: tuple[str, ...]
    tier: str
    max_tokens: int
    temperature: float | None = None  # None: the model's default
    seed: int = 0

    @property
    def quality(self) -> dict[str, Any]:
        """The tier, at a fixed length where it goes by a measured policy, which may draft nothing. Raises InvalidRequest."""
        tier = check_tier(self.tier, TIERS, param="tier")
        is_measured = isinstance(TIERS[tier].policy, MeasuredLibraSpec)
        return {"tier": tier, "speculation": SETTLED.length} if is_measured else {"tier": tier}

    @property
    def options(self) -> GenerateOptions:
        """As `Pair.generate` takes them."""
        options: GenerateOptions = {
            "quality": self.quality,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "ignore_eos": True,
        }
        return options if self.temperature is None else {**options, "temperature": self.temperature}


@dataclass(frozen=True, slots=True)
class PairSettings:
    """The pair that answers; fields as those of `specdiff_dist.load_pair`."""

    model: str
    drafter: str | None
    dtype: str
    num_threads: int | None


def rounds_in_process(workload: Workload, settings: PairSettings) -> Iterator[tuple[RoundRecord, ...]]:
    """The rounds of each request, over local roles. Raises as `load_pair` and `Pair.generate`."""
    from specdiff_dist.api import load_pair

    pair = load_pair(settings.model, drafter=settings.drafter, dtype=settings.dtype, num_threads=settings.num_threads)
    with pair:
        for prompt in workload.prompts:
            yield pair.generate(prompt, **workload.options).rounds
