"""`specdiff bench speed`: how much faster than what a user has for nothing."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specdiff_dist.cli_options import (
    Dtype,
    Json,
    Model,
    NumPrompts,
    Sets,
    SetsFolder,
    Threads,
    Tier,
    given,
    quality_of,
    say,
    stderr,
)
from specdiff_dist.errors import InvalidConfig, InvalidRequest

if TYPE_CHECKING:
    from specdiff_dist.api import GenerateOptions, Pair, Prompt
    from specdiff_dist.bench.prompt_sets import PromptSet
    from specdiff_dist.bench.speed import Answers, Contender, Task
    from specdiff_dist.config import DecodeConfig
    from specdiff_dist.types import GenerateRequest


def bench_speed(
    sets: Sets = None,
    data: SetsFolder = None,
    num_prompts: NumPrompts = 32,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per answer, whatever EOS says.")] = 128,
    tier: Tier = None,
    quality: Annotated[
        str | None, typer.Option(help="What the HTTP field `quality` takes, as JSON: '{\"draft_top_k\": 16}'.")
    ] = None,
    num_denoising_steps: Annotated[int | None, typer.Option(help="Diffusion effort K.", show_default="tier's")] = None,
    length: Annotated[
        int | None, typer.Option("--length", "--block", help="Tokens to draft in a round.", show_default="tier's")
    ] = None,
    speculation: Annotated[
        str | None, typer.Option(help='A policy: name or name:{"field": value}.', show_default="tier's")
    ] = None,
    leniency: Annotated[float | None, typer.Option(help="0 is exact, larger looser.", show_default="tier's")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", show_default="model's")] = None,
    top_p: Annotated[float | None, typer.Option(show_default="model's")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 is off.", show_default="model's")] = None,
    seed: int = 0,
    through: Annotated[str, typer.Option(help="local: one process; serve: the deployments, over HTTP.")] = "local",
    drafter: Annotated[
        list[str] | None, typer.Option(help="As for `generate`; may be given several times.", show_default="combined")
    ] = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option(help="generate, plain, prompt_lookup; may be given several times.", show_default="all"),
    ] = None,
    llama_cpp: Annotated[
        Path | None,
        typer.Option(help="The same model as GGUF file: llama.cpp takes part, too (needs llama-cpp-python)."),
    ] = None,
    model: Model = "smollm2-135m",
    dtype: Dtype = "auto",
    threads: Threads = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Every λ of 0, .2, … 1 with every K of 1, 2, 4, under the linear rule.")
    ] = False,
    picture: Annotated[Path | None, typer.Option(help="With --sweep: speed against mean TV, as PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Speed against transformers' generate, its prompt lookup, and our own plain decoding, in turns on every prompt."""
    from specdiff_dist.bench.contenders import loaded_pairs
    from specdiff_dist.bench.prompt_sets import read_sets
    from specdiff_dist.bench.speed import LLAMA_CPP, measure, num_runs
    from specdiff_dist.quality import policy_fields

    drafters = drafter or ["combined"]
    _check(drafters, through, length, speculation, baseline, is_sweep=sweep, has_picture=picture is not None)
    policy = length if speculation is None else policy_fields(speculation, option="--speculation")
    overrides = quality_of(quality, num_denoising_steps, policy, leniency)
    options = given(
        tier=tier, quality=overrides, temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens
    )
    prompt_sets = read_sets(sets or [], data, num_prompts)
    with ExitStack() as opened:
        with stderr.status("loading"):
            pairs = opened.enter_context(
                loaded_pairs(model, drafters, dtype=dtype, num_threads=threads, progress=say)
            )  # fmt: skip
            tasks = {one.name: _tasks(one, pairs[0], seed) for one in prompt_sets}
            contenders, prepared = _contenders(
                opened, pairs, drafters, prompt_sets[0].prompts[0], options, through, model, dtype, baseline,
                is_sweep=sweep,
            )  # fmt: skip
            if llama_cpp is not None:
                contenders = {**contenders, LLAMA_CPP: _llama_cpp(llama_cpp, prepared[0], tasks)}
        with Progress(console=stderr, transient=True) as bar:
            at = bar.add_task("measuring", total=num_runs(tasks, len(contenders)))
            found = measure(tasks, contenders, max_tokens, progress=lambda: bar.advance(at))
        setting = _setting(pairs, drafters, prepared, tasks, through, seed, is_sweep=sweep)
    report = {"setting": setting, **_measured(found, drafters, prepared[0], is_sweep=sweep)}
    if picture is not None:
        from specdiff_dist.pictures import draw_sweep

        draw_sweep(picture, report["sweep"])
    if as_json:
        print(json.dumps(report))
    else:
        _print(report)


Prepared = tuple["GenerateRequest", "DecodeConfig", str]


def _check(
    drafters: Sequence[str],
    through: str,
    length: int | None,
    speculation: str | None,
    baseline: Sequence[str] | None,
    *,
    is_sweep: bool,
    has_picture: bool,
) -> None:
    """What can be refused before anything is loaded."""
    from specdiff_dist.bench.speed import BASELINES

    for name in baseline or ():
        if name not in BASELINES:
            raise InvalidConfig(f"--baseline must be {', '.join(BASELINES)}, not {name!r}")
    if baseline and is_sweep:
        raise InvalidConfig("--sweep has its own baselines; leave --baseline out")
    if through not in ("local", "serve"):
        raise InvalidConfig(f"--through must be local or serve, not {through!r}")
    if len(set(drafters)) < len(drafters):
        raise InvalidConfig("a drafter is given twice; give each --drafter once")
    if len(drafters) > 1 and (through == "serve" or is_sweep):
        raise InvalidConfig("give one --drafter; several are compared with --through local and without --sweep")
    if length is not None and speculation is not None:
        raise InvalidRequest(
            "length and speculation are given both; put the length into the policy: --speculation 'static:{\"length\": 6}'",
            param="speculation",
        )
    if is_sweep and (through == "serve" or speculation is not None):
        raise InvalidConfig("--sweep goes with --through local and one --length (not --speculation)")
    if has_picture and not is_sweep:
        raise InvalidConfig("--picture draws a sweep; give --sweep too")


def _tasks(prompts: PromptSet, pair: Pair, seed: int) -> list[Task]:
    from specdiff_dist.api import tokenize
    from specdiff_dist.bench.speed import Task

    return [
        Task(prompt, tuple(tokenize(pair.tokenizer, prompt)), seed + index)
        for index, prompt in enumerate(prompts.prompts)
    ]


def _contenders(
    opened: ExitStack,
    pairs: Sequence[Pair],
    drafters: Sequence[str],
    prompt: Prompt,
    options: GenerateOptions,
    through: str,
    model: str,
    dtype: str,
    baseline: Sequence[str] | None,
    *,
    is_sweep: bool,
) -> tuple[dict[str, Contender], Prepared]:
    """Everybody who takes part, and what ours are asked for. `pairs[0]` is the plain one; `baseline` None: all that apply."""
    from specdiff_dist.bench import baselines
    from specdiff_dist.bench.contenders import LocalContender
    from specdiff_dist.bench.speed import BASELINES, GENERATE, PLAIN, PROMPT_LOOKUP
    from specdiff_dist.bench.sweep import CELLS, cell_name, cell_quality

    plain, *drafting = pairs
    asked = options.get("quality") or {}
    if is_sweep:
        if "exact" in (options.get("tier"), asked.get("tier")):
            raise InvalidConfig("--sweep needs a tier that takes leniency; leave --tier out")
        base = {**given(tier=options.get("tier")), **asked}
        cells = {
            cell_name(*cell): cast("GenerateOptions", {**_plainly(options), "quality": cell_quality(base, *cell)})
            for cell in CELLS
        }
        prepared = drafting[0].prepare(prompt, **next(iter(cells.values())))
        ours: dict[str, Contender] = {
            name: LocalContender(drafting[0], settings) for name, settings in cells.items()
        }  # fmt: skip
    else:
        prepared = [pair.prepare(prompt, **options) for pair in drafting][0]  # noqa: RUF015 (all are checked)
        ours = {
            contender_name(name): LocalContender(pair, options) for name, pair in zip(drafters, drafting, strict=True)
        }
    request, _, tier = prepared
    wanted = baseline or ((GENERATE, PLAIN) if is_sweep else BASELINES)
    others: dict[str, Contender] = {}
    if PLAIN in wanted:
        others[PLAIN] = LocalContender(plain, _plainly(options))
    if theirs := [name for name in (GENERATE, PROMPT_LOOKUP) if name in wanted]:
        dtype = plain.verifier.engine.info.dtype
        # transformers has no such blocks; ours have float32's law
        transformers = baselines.TransformersModel(plain.folder.path, dtype="float32" if dtype == "int4" else dtype)
        for name in theirs:
            others[name] = transformers.contender(
                request.sampling, request.max_tokens, prompt_lookup=name == PROMPT_LOOKUP
            )
    if through == "serve":
        ours = {contender_name(drafters[0]): _served(opened, model, drafters[0], dtype, request, tier, asked)}
    return {**others, **ours}, prepared


def _llama_cpp(path: Path, request: GenerateRequest, tasks: Mapping[str, Sequence[Task]]) -> Contender:
    from specdiff_dist.bench.baselines import num_threads
    from specdiff_dist.bench.llama_cpp import LlamaCppContender

    context = max(len(task.token_ids) for each in tasks.values() for task in each) + request.max_tokens + 1
    return LlamaCppContender(
        path, request.sampling, request.max_tokens, context=context, num_threads=num_threads()["here"]
    )


def _plainly(options: GenerateOptions) -> GenerateOptions:
    """Without the dials."""
    return cast("GenerateOptions", {name: value for name, value in options.items() if name not in ("tier", "quality")})


def _served(
    opened: ExitStack,
    model: str,
    drafter: str,
    dtype: str,
    request: GenerateRequest,
    tier: str,
    quality: Mapping[str, Any],
) -> Contender:
    from specdiff_dist.bench.baselines import num_threads

    try:
        from deployments.bench_speed import HttpContender, app_settings, served
    except ImportError as error:
        raise InvalidConfig(f"{error}; run this in the checkout, or use --through local") from error
    port = opened.enter_context(served(app_settings(model, drafter, dtype, num_threads()["here"])))
    contender = HttpContender(port, request.sampling, request.max_tokens, tier, quality)
    opened.callback(contender.close)
    return contender


def contender_name(drafter: str) -> str:
    """Of ours, so that no drafter's name meets a baseline's."""
    return f"drafter {drafter}"


def _setting(
    pairs: Sequence[Pair],
    drafters: Sequence[str],
    prepared: Prepared,
    tasks: Mapping[str, Sequence[Task]],
    through: str,
    seed: int,
    *,
    is_sweep: bool,
) -> dict[str, Any]:
    """Everything a number depends on."""
    from specdiff_dist.bench import baselines
    from specdiff_dist.receipts import config_report

    request, config, tier = prepared
    sampling = request.sampling
    setting = {
        "model": pairs[0].folder.name, "drafters": list(drafters), "through": through, "tier": tier,
        "config": config_report(config), "temperature": sampling.temperature, "top_p": sampling.top_p,
        "top_k": sampling.top_k, "seed": seed, "max_tokens": request.max_tokens,
        "num_prompts": {name: len(each) for name, each in tasks.items()},
        "dtype": pairs[0].verifier.engine.info.dtype, "threads": baselines.num_threads(), "num_cores": os.cpu_count(),
        "machine": f"{platform.machine()} {platform.system()}", "python": platform.python_version(),
        "versions": baselines.versions(), "prompt_lookup_num_tokens": baselines.PROMPT_LOOKUP_NUM_TOKENS,
    }  # fmt: skip
    if is_sweep:
        for name in ("rule", "leniency"):  # what the sweep sets
            del setting["config"][name]
        del setting["config"]["effort"]["num_denoising_steps"]
    return setting


def _measured(
    found: Mapping[str, Answers], drafters: Sequence[str], request: GenerateRequest, *, is_sweep: bool
) -> dict[str, Any]:
    from specdiff_dist.bench.speed import set_report
    from specdiff_dist.bench.sweep import sweep_report

    if is_sweep:
        return sweep_report(found)
    ours = {name: contender_name(name) for name in drafters}
    greedy = request.sampling.is_greedy
    return {"sets": {name: set_report(answers, ours, is_greedy=greedy) for name, answers in found.items()}}


def _print(report: dict[str, Any]) -> None:
    """Tables for a person; --json has the rest."""
    columns = {
        "speedup_vs_generate": "× generate", "speedup_vs_prompt_lookup": "× prompt lookup", "speedup_vs_plain": "× plain",
        "speedup_vs_llama_cpp": "× llama.cpp",
        "tokens_per_s": "tokens/s", "acceptance_length": "tokens/round", "mean_tv": "mean TV", "draft_ms": "draft ms",
        "verify_ms": "verify ms",
    }  # fmt: skip
    rows: list[tuple[str, Mapping[str, Any]]] = []
    if "sweep" in report:
        del columns["speedup_vs_prompt_lookup"]
        rows = [(f"K = {cell['k']}, λ = {cell['leniency']:g}", cell) for cell in report["sweep"]]
    for name, measured in report.get("sets", {}).items():
        rows += [(f"{name}: {drafter}", numbers) for drafter, numbers in measured["drafters"].items()]
        rows += [(f"{name}: {baseline}", numbers) for baseline, numbers in measured["baselines"].items()]
    table = Table(box=None)
    table.add_column("")
    for title in columns.values():
        table.add_column(title, justify="right")
    for name, numbers in rows:
        table.add_row(name, *(_shown(numbers.get(key)) for key in columns))
    Console(width=max(140, Console().width)).print(table)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
