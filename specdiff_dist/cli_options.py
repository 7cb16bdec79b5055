"""What the commands of `specdiff` share: options, progress on stderr, prompts, the pair."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from specdiff_dist.errors import InvalidRequest
from specdiff_dist.prompt_files import read_prompt_file

if TYPE_CHECKING:
    from specdiff_dist.api import Pair, Prompt

stderr = Console(stderr=True, highlight=False)

Json = Annotated[bool, typer.Option("--json", help="One JSON object per answer, the last line of stdout.")]
Model = Annotated[str, typer.Option(help="A known name (see `specdiff models`), a local folder or a hub id.")]
DrafterName = Annotated[
    str, typer.Option("--drafter", help="diffusion, prompt-lookup, combined, none, or a folder with drafter weights.")
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or int4, of the verifier.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads of the models.", show_default="PyTorch's choice")]
Sets = Annotated[
    list[str] | None,
    typer.Option(help="gsm8k, mt_bench, humaneval, builtin or NAME=FILE.jsonl; commas or several times."),
]
SetsFolder = Annotated[
    Path | None, typer.Option(help="Folder of the task sets.", show_default="$SPECDIFF_DATA", file_okay=False)
]
NumPrompts = Annotated[int, typer.Option(min=1, help="Of each set, spread evenly over it.")]
Tier = Annotated[str | None, typer.Option(help="exact, high, balanced, fast or turbo.", show_default="exact")]


def read_prompts(prompt: str | None, prompt_file: Path | None, limit: int | None) -> Iterator[Prompt]:
    """The prompts of the command line, of stdin or of a JSON-lines file."""
    if (prompt is None) == (prompt_file is None):
        raise InvalidRequest('give either a prompt (or - for stdin) or --prompt-file: specdiff generate "Hello"')
    if prompt_file is None:
        yield sys.stdin.read() if prompt == "-" else str(prompt)
        return
    yield from read_prompt_file(prompt_file, limit)


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


def quality_of(
    text: str | None, num_denoising_steps: int | None, speculation: Any, leniency: float | None
) -> dict[str, Any] | None:
    """The `quality` object that --quality and its shorthands make up. `speculation`: a length, or a policy's object."""
    quality: Any = {}
    if text is not None:
        try:
            quality = json.loads(text)
        except json.JSONDecodeError:
            quality = {"tier": text}  # a bare tier name, as in the HTTP field
        if isinstance(quality, str):
            quality = {"tier": quality}
        if not isinstance(quality, dict):
            raise InvalidRequest("--quality takes a JSON object or a tier name", param="quality")
    shorthands = given(effort=num_denoising_steps, speculation=speculation, leniency=leniency)
    for key in shorthands.keys() & quality.keys():
        raise InvalidRequest(f"{key} is given twice: in --quality and by its own option; drop one", param="quality")
    return {**quality, **shorthands} or None


def given(**options: Any) -> Any:
    """Only the options that were given."""
    return {name: value for name, value in options.items() if value is not None}
