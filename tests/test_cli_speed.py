"""`specdiff bench speed`: a tiny random pair for real, the report's keys, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.tiny_models import VOCAB_SIZE, save_drafter, save_verifier, tiny_llama

CONTRACT = {
    "speedup_vs_generate", "speedup_vs_plain", "speedup_vs_prompt_lookup", "acceptance_length", "mean_tv", "tokens_per_s",
}  # fmt: skip
Finished = tuple[int, str, str]


def report(done: Finished) -> dict[str, Any]:
    assert done[0] == 0, done[2]
    return json.loads(done[1].splitlines()[-1])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[str, ...]:
    """Options that ask for a random pair of two layers each, and a set of two prompts."""
    root: Path = tmp_path_factory.mktemp("tiny")
    model = save_verifier(root / "model", tiny_llama())
    words = Tokenizer(WordLevel({f"w{index}": index for index in range(VOCAB_SIZE)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    words.save(str(model / "tokenizer.json"))
    drafter = save_drafter(root / "drafter", tiny_llama())
    lines = [{"prompt": " ".join(f"w{i * step % VOCAB_SIZE}" for i in range(12))} for step in (7, 11)]
    (root / "mine.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return (
        *("--model", str(model), "--drafter", str(drafter), "--sets", f"mine={root / 'mine.jsonl'}"),
        *("--max-tokens", "12", "--dtype", "float32", "--json"),
    )


def test_a_real_pair_has_the_contracts_keys(specdiff, tiny):
    done = report(specdiff("bench", "speed", *tiny, "--temperature", 0, "--length", 3))

    setting, numbers = done["setting"], done["sets"]["mine"]
    assert numbers.keys() > CONTRACT
    assert all(numbers[key] > 0 for key in CONTRACT - {"mean_tv"})
    assert numbers["mean_tv"] == 0.0
    assert numbers["greedy_equal"] == 1.0  # float32: token for token transformers' own
    assert [numbers["baselines"][name]["greedy_equal"] for name in ("plain", "prompt_lookup")] == [1.0, 1.0]
    assert numbers["num_prompts"] == 2
    assert sum(numbers["acceptance_histogram"]) == numbers["num_rounds"]
    assert sum(count * (length + 1) for length, count in enumerate(numbers["acceptance_histogram"])) >= 24
    assert numbers["draft_ms"] > 0 and numbers["verify_ms"] > 0
    assert setting["config"]["speculation"] == {"policy": "static", "length": 3}
    assert (setting["tier"], setting["temperature"], setting["dtype"]) == ("exact", 0.0, "float32")
    assert setting["threads"]["here"] == setting["threads"]["in_engine_thread"]


def test_drafters_are_compared_in_one_run(specdiff, tiny):
    dials = ("--tier", "balanced", "--leniency", 0.3, "--temperature", 1.0, "--top-k", 20, "--num-denoising-steps", 2)
    others = ("--drafter", "prompt-lookup", "--drafter", f"{tiny[3]}+prompt-lookup")
    done = report(specdiff("bench", "speed", *tiny, *others, *dials))

    numbers = done["sets"]["mine"]
    assert list(numbers["drafters"]) == done["setting"]["drafters"]
    diffusion, lookup, combined = numbers["drafters"].values()
    assert combined["acceptance_length"] >= 1.0
    assert numbers["tokens_per_s"] == diffusion["tokens_per_s"] != lookup["tokens_per_s"]
    assert diffusion["mean_tv"] > 0.0
    assert numbers["greedy_equal"] is None
    config = done["setting"]["config"]
    assert (config["rule"], config["leniency"], config["effort"]["num_denoising_steps"]) == ("lenience", 0.3, 2)


def test_a_sweep_has_every_cell_and_a_picture(specdiff, tiny, tmp_path):
    picture = tmp_path / "sweep.png"
    done = report(
        specdiff("bench", "speed", *tiny, "--sweep", "--temperature", 1, "--num-prompts", 1, "--picture", picture)
    )

    assert len(done["sweep"]) == 18
    assert {"k", "leniency", "speedup_vs_plain", "mean_tv", "acceptance_length"} < done["sweep"][0].keys()
    tv = {(cell["k"], cell["leniency"]): cell["mean_tv"] for cell in done["sweep"]}
    length = {(cell["k"], cell["leniency"]): cell["acceptance_length"] for cell in done["sweep"]}
    for steps in (1, 2, 4):
        assert tv[steps, 0.0] == 0.0 < tv[steps, 1.0]
        assert length[steps, 1.0] >= length[steps, 0.0]  # a short answer may be accepted whole anyway
        assert length[steps, 1.0] == pytest.approx(12 / 3)  # all is accepted: 4 + 1 tokens a round, 12 in three rounds
    assert sum(length[steps, 1.0] - length[steps, 0.0] for steps in (1, 2, 4)) > 0
    assert done["frontier"]
    assert done["setting"]["config"]["effort"] == {"reveal_order": "left_to_right", "early_reveal": "proposal"}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_json_there_is_a_table(specdiff, tiny):
    code, out, err = specdiff("bench", "speed", *tiny[:-1], "--speculation", 'static:{"length": 2}')
    assert code == 0, err
    for text in ("× generate", "tokens/round", "mine: generate", "mine: prompt_lookup"):
        assert text in out


def test_a_prompt_that_does_not_fit_is_an_error(specdiff, tiny):
    code, out, err = specdiff("bench", "speed", *tiny, "--max-tokens", 250)
    assert (code, out) == (2, "")
    assert "maximum context length is 256" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--through", "pigeon"), "--through must be local or serve, not 'pigeon'"),
        (("--drafter", "a", "--drafter", "a"), "a drafter is given twice"),
        (("--drafter", "a", "--drafter", "b", "--through", "serve"), "give one --drafter"),
        (("--baseline", "best"), "--baseline must be generate, plain, prompt_lookup, not 'best'"),
        (("--sweep", "--baseline", "plain"), "--sweep has its own baselines"),
        (("--length", "3", "--speculation", "off"), "length and speculation are given both"),
        (("--speculation", "static:{"), "give it as name or name:{JSON object}"),
        (("--speculation", "static:3"), "must be a JSON object"),
        (("--sweep", "--through", "serve"), "--sweep goes with --through local"),
        (("--sweep", "--speculation", "off"), "--sweep goes with --through local and one --length"),
        (("--picture", "a.png"), "--picture draws a sweep"),
        (("--quality", '{"effort": 2}', "--num-denoising-steps", "2"), "effort is given twice"),
        (("--sets", "best"), "unknown set 'best'"),
    ],
)
def test_errors_come_before_anything_is_loaded(specdiff, monkeypatch, arguments, message):
    def load(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("specdiff_dist.api.load_pair", load)
    code, out, err = specdiff("bench", "speed", *arguments)
    assert (code, out) == (2, "")
    assert message in err.replace("\n", " ")
    assert len(err.splitlines()) == 1


def test_the_exact_tier_is_refused_leniency_and_a_sweep(specdiff, tiny):
    assert "the exact tier needs leniency 0" in specdiff("bench", "speed", *tiny, "--leniency", 0.2)[2]
    assert (
        "--sweep needs a tier that takes leniency" in specdiff("bench", "speed", *tiny, "--sweep", "--tier", "exact")[2]
    )


def test_the_help_says_what_it_compares_with(specdiff):
    code, out, _ = specdiff("bench", "speed", "--help")
    assert code == 0
    for text in ("prompt lookup", "plain decoding", "--through", "--sweep", "gsm8k"):
        assert text in " ".join(out.split())
