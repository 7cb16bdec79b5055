"""What the commands of `specdiff` share: options, progress on stderr, prompts, the pair."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from specdiff_dist.errors import InvalidRequest

if TYPE_CHECKING:
    from specdiff_dist.api import Pair, Prompt

stderr = Console(stderr=True, highlight=False)

Json = Annotated[bool, typer.Option("--json", help="One JSON object per answer, the last line of stdout.")]
Model = Annotated[str, typer.Option(help="A known name (see `specdiff models`), a local folder or a hub id.")]
DrafterName = Annotated[
    str, typer.Option("--drafter", help="diffusion, prompt-lookup, none, or a folder with drafter weights.")
]
Dtype = Annotated[str, typer.Option(help="auto, float32 or bfloat16, for both models.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads of the models.", show_default="PyTorch's choice")]
Tier = Annotated[str | None, typer.Option(help="exact, high, balanced, fast or turbo.", show_default="exact")]


def read_prompts(prompt: str | None, prompt_file: Path | None, limit: int | None) -> Iterator[Prompt]:
    """The prompts of the command line, of stdin or of a JSON-lines file."""
    if (prompt is None) == (prompt_file is None):
        raise InvalidRequest('give either a prompt (or - for stdin) or --prompt-file: specdiff generate "Hello"')
    if prompt_file is None:
        yield sys.stdin.read() if prompt == "-" else str(prompt)
        return
    try:
        lines = prompt_file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidRequest(f"cannot read {prompt_file}: {error.strerror}; check the path") from error
    for number, line in list(enumerate(filter(str.strip, lines), 1))[:limit]:
        yield _prompt_of(line, f"{prompt_file}, object {number}")


def _prompt_of(line: str, where: str) -> Prompt:
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{where} is not JSON ({error.msg}); put one object on each line") from error
    for key in ("messages", "prompt", "question"):
        if isinstance(item, dict) and isinstance(item.get(key), list if key == "messages" else str):
            return item[key]
    raise InvalidRequest(f'{where} has no "prompt" or "question" text and no "messages" list')


@contextmanager
def loaded_pair(model: str, drafter: str, dtype: str, threads: int | None) -> Iterator[Pair]:
    from specdiff_dist.api import load_pair

    with stderr.status(f"loading {escape(model)}"):
        pair = load_pair(
            model, drafter=None if drafter == "none" else drafter, dtype=dtype, num_threads=threads, progress=say
        )
    with pair:
        yield pair


def say(message: str) -> None:
    stderr.print(f"[dim]{escape(message)}[/]", soft_wrap=True)
