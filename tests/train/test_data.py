"""A verifier's answers from prompt files to shards: what is in them, and that nothing stops them from being the same."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import filelock
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from specdiff_dist.errors import InvalidConfig
from specdiff_dist.text import Tokenizer
from specdiff_dist.train.answers import read_meta
from specdiff_dist.train.data import DataSettings, Progress, make_answers
from specdiff_dist.train.filters import answer_fault, prompt_fault
from specdiff_dist.train.user_turn import UserTurn
from tests.train import make_answers_process
from tests.train.make_answers_process import SETTINGS
from tests.train.tiny_chat import END, some_prompts, write_chat_model, write_prompts

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_chat_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "asked.jsonl", some_prompts(30))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As the process that is killed: sums over another number of threads round differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def made(one_thread, model, prompts, tmp_path_factory):
    return make_answers(model, [prompts], [], 60, tmp_path_factory.mktemp("out") / "data", settings=SETTINGS)


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.npz"))}


def test_every_answer_is_the_verifiers_own(made, model):
    store, network = made.store, AutoModelForCausalLM.from_pretrained(model).eval()
    assert store.num_answers >= 60
    tokenizer = Tokenizer.load(Path(model))
    asked = {tuple(tokenizer.apply_chat_template([{"role": "user", "content": text}])) for text in some_prompts(30)}
    num_greedy = 0
    for answer in (store.answer(index) for index in range(store.num_answers)):
        prompt, words = answer.token_ids[: answer.prompt_length], answer.answer_ids
        assert answer_fault(words) is None
        assert END not in words[:-1]
        assert len(answer.top_ids) == len(answer.top_log_probs) == len(words)
        assert store.meta["sources"][answer.source] == ("asked.jsonl" if tuple(prompt) in asked else "self")
        with torch.inference_mode():
            logits = network(torch.from_numpy(answer.token_ids.astype(np.int64))[None]).logits[0]
        log_probs = torch.log_softmax(logits[answer.prompt_length - 1 : -1, :65], dim=-1)
        expected = torch.topk(log_probs, 32, dim=-1).values
        assert np.allclose(answer.top_log_probs, expected, atol=4e-3)
        assert np.allclose(log_probs.gather(1, torch.from_numpy(answer.top_ids).long()), expected, atol=1e-4)
        num_greedy += words.tolist() == log_probs.argmax(dim=-1).tolist()
    assert 0.2 < num_greedy / store.num_answers < 0.8


def test_the_verifiers_own_prompts_are_framed_and_new(made, model):
    tokenizer = Tokenizer.load(Path(model))
    opening = UserTurn.of(tokenizer).opening
    written = [tuple(prompt) for prompt in made.store.prompts(1)]
    assert len(written) == len(set(written)) > 3
    for prompt in written:
        assert prompt[: len(opening)] == opening
        words = prompt[len(opening) : prompt.index(END, len(opening))]
        assert prompt_fault(np.array(words, np.int32), ended=True) is None


def test_what_is_there_is_not_made_again(made, model, prompts):
    before = shards(made.store.folder)
    again = make_answers(model, [prompts], [], made.store.num_answers, made.store.folder, settings=SETTINGS)
    assert again.num_tokens == 0
    assert shards(made.store.folder) == before


def test_a_missing_shard_is_made_again_as_it_was_and_later_ones_are_kept(made, model, prompts, tmp_path):
    for name in ("meta.json", *shards(made.store.folder)):
        (tmp_path / name).write_bytes((made.store.folder / name).read_bytes())
    (tmp_path / "shard-00001.npz").unlink()
    (tmp_path / "shard-00002.tmp").write_bytes(b"half")
    make_answers(model, [prompts], [], made.store.num_answers, tmp_path, settings=SETTINGS)
    assert shards(tmp_path) == shards(made.store.folder)
    assert not list(tmp_path.glob("*.tmp"))


def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(made, model, prompts, tmp_path):
    script = [sys.executable, make_answers_process.__file__, model, str(prompts), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([*script, "100000"], env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600  # a starved machine needs minutes to import torch
    while not shards(tmp_path) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    num_left = len(shards(tmp_path))
    assert num_left >= 1
    subprocess.run([*script, str(made.store.num_answers)], env=environment, check=True, timeout=600)
    expected, found = shards(made.store.folder), shards(tmp_path)
    assert len(found) >= num_left
    assert {name: found[name] for name in expected} == expected
    assert read_meta(tmp_path) == made.store.meta


def test_evaluation_prompts_are_left_out_and_reported(model, tmp_path):
    long = some_prompts(1, length=20)[0]
    asked = write_prompts(tmp_path / "asked.jsonl", [*some_prompts(12), f"w1 {long} w2"])
    known = write_prompts(tmp_path / "known.jsonl", [some_prompts(12)[4].upper(), long])
    said: list[str] = []
    settings = dataclasses.replace(SETTINGS, self_written=0.0)
    made = make_answers(
        model, [asked], [known], 1000, tmp_path / "data", settings=settings, progress=Progress(said.append)
    )  # fmt: skip
    report = made.store.meta["prompt_files"][0]
    assert (report["num_prompts"], report["num_used"], report["num_contaminated"]) == (13, 11, 2)
    assert report["contaminated"] == [{"prompt": 4, "reason": "exact"}, {"prompt": 12, "reason": "shingle"}]
    assert "0 of 11 training prompts occur in the evaluation sets" in said
    tokenizer = Tokenizer.load(Path(model))
    left_out = tokenizer.apply_chat_template([{"role": "user", "content": some_prompts(12)[4]}])
    assert left_out not in [prompt.tolist() for prompt in made.store.prompts(0)]
    assert any("every prompt is used up" in message for message in said)


def test_a_deadline_ends_with_a_whole_shard(model, prompts, tmp_path):
    made = make_answers(model, [prompts], [], 100_000, tmp_path, settings=SETTINGS, deadline_s=0.0)
    assert made.store.num_shards == 1


def test_another_recipe_is_refused(made, model, prompts):
    other = dataclasses.replace(SETTINGS, seed=1, max_new_tokens=41)
    with pytest.raises(InvalidConfig, match="another max_new_tokens, seed"):
        make_answers(model, [prompts], [], 1, made.store.folder, settings=other)


def test_two_runs_do_not_write_to_one_folder(model, prompts, tmp_path):
    with filelock.FileLock(tmp_path / ".lock"), pytest.raises(InvalidConfig, match="another run"):
        make_answers(model, [prompts], [], 1, tmp_path, settings=SETTINGS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"self_written": 1.5}, "from 0 to 1"),
        ({"shard_size": 0}, "shard_size"),
        ({"seed": -1}, "negative"),
        ({"dtype": "int8"}, "dtype"),
    ],
)
def test_settings_are_checked(change, message):
    with pytest.raises(InvalidConfig, match=message):
        DataSettings(**change)


def test_prompts_that_leave_no_room_are_refused(model, prompts, tmp_path):
    settings = dataclasses.replace(SETTINGS, max_new_tokens=128)
    with pytest.raises(InvalidConfig, match="leaves no room"):
        make_answers(model, [prompts], [], 1, tmp_path, settings=settings)
    settings = dataclasses.replace(SETTINGS, max_prompt_tokens=5)
    with pytest.raises(InvalidConfig, match=r"no prompt of asked\.jsonl"):
        make_answers(model, [prompts], [], 1, tmp_path, settings=settings)
