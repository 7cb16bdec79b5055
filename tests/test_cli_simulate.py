"""`specdiff simulate` and `specdiff bench model`: keys, pictures, errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdiff_dist import api
from specdiff_dist.simulate.trace import read_trace, write_trace
from tests.byte_model import make_pair
from tests.simulate.rounds import made_round

PNG = b"\x89PNG"
POLICIES = {"static", "additive", "failfast", "libraspec", "libraspec_measured"}
COSTS = ("--draft-cost", "1,0", "--verify-cost", "10,1")


@pytest.fixture
def specdiff(specdiff, monkeypatch, tmp_path) -> Callable[..., tuple[int, str, str]]:
    """Over table models."""
    monkeypatch.setattr(api, "load_pair", lambda model, **options: make_pair(tmp_path / "model"))
    return specdiff


def report(done: tuple[int, str, str]) -> dict[str, Any]:
    assert done[0] == 0, done[2]
    return json.loads(done[1].splitlines()[-1])


@pytest.fixture
def trace(tmp_path) -> Path:
    good, bad = made_round([1.0] * 4, confidence=[0.9] * 4, num_accepted=4), made_round([0.0] * 4, confidence=[0.1] * 4)
    path = tmp_path / "made.trace"
    write_trace(path, [[good, bad, good], [good]], {})
    return path


def test_a_trace_is_recorded_replayed_and_drawn(specdiff, tmp_path):
    path, picture = tmp_path / "a.trace", tmp_path / "a.png"
    answers = specdiff(
        *("generate", "hello", "--raw", "--max-tokens", 40, "--json", "--trace", path),
        *("--quality", '{"speculation": {"policy": "additive", "start": 3, "max_length": 8}}'),
    )  # fmt: skip
    num_rounds = report(answers)["metrics"]["speculative_decoding"]["num_spec_steps"]
    about, requests = read_trace(path)
    assert [len(rounds) for rounds in requests] == [num_rounds]
    assert about["temperature"] == 0.0
    assert isinstance(about["config"], dict)
    assert about["config"]["speculation"]["policy"] == "additive"
    assert b"hello" not in path.read_bytes()

    replayed = report(specdiff("simulate", "--trace", path, "--picture", picture, "--json"))
    assert replayed["mean_abs_deviation"].keys() == replayed["expected_speedup"].keys() == POLICIES
    assert picture.read_bytes().startswith(PNG)


def test_one_policy_by_hand(specdiff, trace):
    """Static 3 against oracles 4, 1, 4, 4: deviations 1, 2, 1, 1; 4 + 1 + 4 + 4 tokens in four rounds of 14 s."""
    done = report(specdiff("simulate", "--trace", trace, "--policy", 'static:{"length": 3}', *COSTS, "--json"))
    assert done["mean_abs_deviation"] == {"static": pytest.approx(5 / 4)}
    assert done["expected_speedup"] == {"static": pytest.approx(13 * 10 / 56)}


def test_leniency_reaches_the_replay(specdiff, trace):
    done = report(
        specdiff("simulate", "--trace", trace, "--policy", 'static:{"length": 4}', "--leniency", 1, *COSTS, "--json")
    )
    assert done["mean_abs_deviation"] == {"static": 0.0}


def test_costs_from_another_trace(specdiff, trace, tmp_path):
    other = tmp_path / "other.trace"
    rounds = [made_round([0.5] * d, draft_s=1.0, verify_s=10.0 + d) for d in (1, 1, 2, 3)]
    write_trace(other, [rounds], {})
    done = report(specdiff("simulate", "--trace", trace, "--costs-from", other, "--json"))
    assert done["costs"]["verify"] == {"intercept": pytest.approx(10.0), "slope": pytest.approx(1.0)}
    assert done["best_static_length"] == 4


def test_a_cluster_has_the_contracts_keys(specdiff):
    done = report(
        specdiff("simulate", "--cluster", "--sessions", 50, "--drafters", 2, "--verifiers", 2, "--routers", 1,
                 "--arrivals-per-s", 10, "--tokens", 8, "--json")
    )  # fmt: skip
    assert {"rounds_per_s", "p99_latency_s", "seconds", "drafter_busy", "verifier_busy"} < done.keys()
    assert done["rounds_per_s"] > 0


def test_a_single_pair_of_the_trace_does_the_traces_rounds_per_s(specdiff, trace):
    """Every recorded round takes 11.5 s, 10 of them in verification, 1 in drafting."""
    done = report(
        specdiff("simulate", "--cluster", "--trace", trace, "--draft-cost", "1,0", "--verify-cost", "10,0",
                 "--sessions", 1, "--drafters", 1, "--verifiers", 1, "--routers", 1, "--tokens", 60, "--json")
    )  # fmt: skip
    assert done["recorded_rounds_per_s"] == pytest.approx(1 / 11.5)
    assert done["rounds_per_s"] == pytest.approx(1 / 11.5)


def test_bench_model_has_the_contracts_keys(specdiff, tmp_path):
    picture = tmp_path / "model.png"
    done = report(specdiff("bench", "model", "--prompt", "one", "--max-tokens", 20, "--picture", picture, "--json"))
    assert {"median_relative_error", "d_k", "cost_fit"} < done.keys()
    assert done["d_k"].keys() == {"1", "2", "4"}
    assert len(done["cells"]) == 18
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate",), "give --trace FILE"),
        (("simulate", "--trace", "missing"), "cannot read the trace missing"),
        (("simulate", "--trace", "{trace}"), "all of one length"),
        (("simulate", "--trace", "{trace}", "--draft-cost", "1", "--verify-cost", "2,1"), "--draft-cost takes two numbers"),
        (("simulate", "--trace", "{trace}", "--draft-cost", "nan,0", "--verify-cost", "2,1"), "--draft-cost takes two"),
        (("simulate", "--cluster", "--draft-cost", "1,0"), "give both"),
        (("simulate", "--trace", "{trace}", "--policy", "best", *COSTS), "must be one of off, static"),
        (("simulate", "--trace", "{trace}", "--picture", "/nowhere/a.png", *COSTS), "cannot write the picture"),
    ],
)  # fmt: skip
def test_errors_are_one_line(specdiff, trace, arguments, message):
    code, out, err = specdiff(*(str(trace) if one == "{trace}" else one for one in arguments))
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_trace_is_written_even_when_generation_breaks_off(specdiff, tmp_path):
    prompts, path = tmp_path / "prompts.jsonl", tmp_path / "a.trace"
    prompts.write_text('{"prompt": "fine"}\n' + json.dumps({"prompt": "x" * 300}) + "\n")
    code, _, err = specdiff("generate", "--prompt-file", prompts, "--max-tokens", 8, "--trace", path, "--json")
    assert code == 2, err
    assert len(read_trace(path)[1][0]) > 0


def test_the_command_loads_matplotlib_only_to_draw():
    script = "import sys; import specdiff_dist.cli, specdiff_dist.pictures, specdiff_dist.bench.model; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
