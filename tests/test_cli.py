"""The `specdiff` command over table models: contract of --json, prompts, errors."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from specdiff_dist import api
from specdiff_dist.bench import core
from specdiff_dist.errors import ModelUnavailable
from tests.byte_model import TABLE, make_pair, write_folder
from tests.doubles import plain_greedy


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str

    @property
    def last(self) -> dict[str, Any]:
        return json.loads(self.out.splitlines()[-1])


@pytest.fixture
def loads(monkeypatch, tmp_path):
    """Replaces the loading of real models; collects what was asked for."""
    asked: list[dict[str, Any]] = []

    def load_pair(model, **options):
        asked.append({"model": model, **options})
        return make_pair(tmp_path, with_drafter=options["drafter"] is not None)

    monkeypatch.setattr(api, "load_pair", load_pair)
    return asked


@pytest.fixture
def specdiff(loads, specdiff):
    """Over table models."""

    def run(*arguments: str, stdin: str = "") -> Finished:
        return Finished(*specdiff(*arguments, stdin=stdin))

    return run


def test_json_has_the_contracts_keys_on_the_last_line(specdiff):
    done = specdiff("generate", "hello", "--raw", "--temperature", "0", "--max-tokens", "24", "--json")

    assert done.code == 0
    answer = done.last
    assert list(answer) == [
        "text",
        "prompt_token_ids",
        "token_ids",
        "finish_reason",
        "usage",
        "metrics",
        "quality",
    ]
    assert answer["token_ids"] == plain_greedy(TABLE, answer["prompt_token_ids"], 24)
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["metrics"]["speculative_decoding"]["mean_acceptance_length"] > 1
    assert answer["quality"]["tier"] == "exact"
    assert answer["quality"]["exact"] is True


def test_without_json_the_text_is_on_stdout_and_the_summary_on_stderr(specdiff):
    text = specdiff("generate", "hello", "--max-tokens", "12", "--json").last["text"]
    done = specdiff("generate", "hello", "--max-tokens", "12")

    assert done.out == text + "\n"
    assert "12 tokens in" in done.err
    assert "tier exact, exact" in done.err


def test_a_dash_reads_the_prompt_from_stdin(specdiff):
    given = specdiff("generate", "hello", "--max-tokens", "4", "--json").last
    piped = specdiff("generate", "-", "--max-tokens", "4", "--json", stdin="hello").last
    assert piped["prompt_token_ids"] == given["prompt_token_ids"]


def test_a_prompt_file_gives_one_line_each_and_loads_once(specdiff, loads, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"question": "one", "answer": "1"}\n\n{"prompt": "two"}\n'
        '{"messages": [{"role": "user", "content": "three"}]}\n{"prompt": "four"}\n'
    )
    done = specdiff("generate", "--prompt-file", str(file), "--limit", "3", "--max-tokens", "4", "--json")

    answers = [json.loads(line) for line in done.out.splitlines()]
    single = [specdiff("generate", text, "--max-tokens", "4", "--json").last for text in ("one", "two", "three")]
    assert [answer["token_ids"] for answer in answers] == [answer["token_ids"] for answer in single]
    assert len(loads) == 1 + len(single)


def test_options_reach_the_round_loop(specdiff, loads):
    done = specdiff(
        *("generate", "hello", "--tier", "balanced", "--num-denoising-steps", "3", "--block", "6"),
        *("--leniency", "0.25", "--quality", '{"draft_top_k": 9}', "--max-tokens", "5", "--seed", "7"),
        *("--model", "some/folder", "--drafter", "prompt-lookup", "--dtype", "float32", "--threads", "1", "--json"),
    )

    expected = {"model": "some/folder", "drafter": "prompt-lookup", "dtype": "float32", "num_threads": 1}
    assert [{key: load[key] for key in expected} for load in loads] == [expected]
    config = done.last["quality"]["config"]
    assert done.last["quality"]["tier"] == "balanced"
    assert config["effort"]["num_denoising_steps"] == 3
    assert config["speculation"] == {"policy": "static", "length": 6}
    assert config["leniency"] == 0.25
    assert config["draft_top_k"] == 9


def test_drafter_none_decodes_plainly(specdiff):
    answer = specdiff("generate", "hello", "--drafter", "none", "--max-tokens", "6", "--json").last
    assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert answer["token_ids"] == plain_greedy(TABLE, answer["prompt_token_ids"], 6)


def test_stop_strings_end_the_text(specdiff):
    text = specdiff("generate", "hello", "--max-tokens", "30", "--json").last["text"]
    stop = next(text[i : i + 2] for i in range(5, 20) if text[i : i + 2].isascii())
    answer = specdiff("generate", "hello", "--max-tokens", "30", "--stop", stop, "--json").last
    assert answer["text"] == text[: text.index(stop)]
    assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate",), "give either a prompt"),
        (("generate", "hello", "--tier", "best"), "unknown quality tier 'best'; the tiers are exact"),
        (("generate", "hello", "--quality", '{"rule": 3}'), "quality.rule must be a string"),
        (("generate", "hello", "--quality", "[1]"), "--quality takes a JSON object"),
        (("generate", "hello", "--quality", '{"effort": 2}', "--num-denoising-steps", "2"), "given twice"),
        (("generate", "hello", "--leniency", "0.2"), "the exact tier needs leniency 0"),
        (("generate", "hello", "--max-tokens", "0"), "max_tokens must be at least 1"),
        (("generate", "--prompt-file", "missing.jsonl"), "cannot read missing.jsonl"),
    ],
)
def test_errors_are_one_line_with_exit_code_2(specdiff, arguments, message):
    done = specdiff(*arguments)

    assert done.code == 2
    assert done.out == ""
    assert message in done.err
    assert done.err.startswith("error: ")
    assert len(done.err.splitlines()) == 1


def test_a_model_that_cannot_be_fetched_is_an_error_too(specdiff, monkeypatch):
    def load_pair(model, **options):
        raise ModelUnavailable("no network [offline]; run `specdiff models smollm2-135m` where there is one")

    monkeypatch.setattr(api, "load_pair", load_pair)
    done = specdiff("generate", "hello")
    assert (done.code, done.err) == (
        2,
        "error: no network [offline]; run `specdiff models smollm2-135m` where there is one\n",
    )


def test_bench_round_reports_the_contracts_keys(specdiff, loads):
    done = specdiff(
        *("bench", "round", "--through", "local", "--num-requests", "2", "--max-tokens", "10", "--drafter", "none"),
        "--json",
    )

    assert done.code == 0, done.err
    split = done.last
    assert {
        "draft_ms",
        "verify_ms",
        "router_ms",
        "wire_ms",
        "other_ms",
        "non_model_ms",
        "non_model_share",
        "bytes_per_round",
    } < split.keys()
    assert split["num_rounds"] == 20  # plain decoding, 2 × 10 tokens: the warm-up request is not counted
    assert split["draft_ms"] == 0
    assert split["verify_ms"] > 0
    assert loads[0]["drafter"] is None


def test_bench_round_through_something_else_is_an_error(specdiff):
    done = specdiff("bench", "round", "--through", "pigeon")
    assert (done.code, done.err) == (2, "error: --through must be serve or local, not 'pigeon'\n")


def test_bench_core_reports_the_contracts_keys(specdiff, monkeypatch):
    measure = core.measure_core
    monkeypatch.setattr(core, "measure_core", lambda **given: measure(vocab_size=2000, block=8, support=16, **given))

    cost = specdiff("bench", "core", "--num-runs", "2", "--json").last
    assert cost["sparse_ms"] == cost["sparse_ms_by_rule"]["linear"] > 0
    assert cost["ratio_vs_dense_torch"] == pytest.approx(cost["dense_torch_ms"]["one_row"] / cost["sparse_ms"])
    assert cost["dense_ms"] > 0 and 1 <= cost["newton_iterations"] <= 8 and 0 < cost["newton_error"] <= 1e-10
    assert "cactus_taylor" in specdiff("bench", "core", "--num-runs", "1").out


def test_models_says_where_a_model_is(specdiff, monkeypatch, tmp_path):
    folder = write_folder(tmp_path / "here")
    monkeypatch.setattr("specdiff_dist.models.resolve", lambda name, progress: folder)

    report = specdiff("models", "bytes", "--json").last["models"]
    assert [(model["name"], model["state"], model["path"]) for model in report] == [
        ("bytes", "ready", str(folder.path))
    ]
    assert report[0]["size_bytes"] > 1000
    assert str(folder.path) in specdiff("models").out


def test_models_passes_the_next_step_on(specdiff):
    done = specdiff("models", "no-such-model")
    assert done.code == 2
    assert "error: unknown model 'no-such-model'; known is smollm2-135m" in done.err


def test_prompt_files_with_wrong_lines_name_the_line(specdiff, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n{"text": "no"}\n')
    done = specdiff("generate", "--prompt-file", str(file))
    assert done.code == 2
    assert "object 2 has no" in done.err
    file.write_text("hello\n")
    assert "object 1 is not JSON" in specdiff("generate", "--prompt-file", str(file)).err


def test_help_names_the_commands_and_loads_no_model_code():
    script = "import sys; sys.argv[1:] = ['--help']; from specdiff_dist import cli\ntry: cli.main()\nexcept SystemExit: print([name for name in ('torch', 'transformers', 'ray', 'grpc') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    for command in ("generate", "models", "bench"):
        assert command in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
