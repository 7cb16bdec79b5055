"""Stops inside accepted blocks: K03, K05, and what a stop does to the text."""

from __future__ import annotations

import pytest

from specdiff_dist.config import DecodeConfig, Static
from specdiff_dist.core.logit_processing import LogitProcessing
from specdiff_dist.engine import decode
from specdiff_dist.engine.stopping import StopMonitor
from specdiff_dist.types import TokenChunk
from tests.doubles import (
    Direct,
    ScriptedDrafter,
    TableVerifier,
    greedy_script,
    make_request,
    plain_greedy,
    random_table,
)

EOS = 0


class Letters:
    """A detokeniser of one character per token id; `lag` characters become certain late, as UTF-8 pieces do."""

    def __init__(self, alphabet: str, lag: int = 0) -> None:
        self._alphabet, self._lag, self._pending = alphabet, lag, ""

    def push(self, token_id: int) -> str:
        self._pending += self._alphabet[token_id]
        certain = self._pending[: max(len(self._pending) - self._lag, 0)]
        self._pending = self._pending[len(certain) :]
        return certain

    def flush(self) -> str:
        rest, self._pending = self._pending, ""
        return rest


def feed(
    text: str, *, stop: tuple[str, ...] = (), max_tokens: int = 1000, stop_token_ids: tuple[int, ...] = (), lag: int = 0
) -> tuple[list[str], str | None, int]:
    """Pushes the characters of `text` ('\\0' is EOS) until the monitor stops."""
    alphabet = "".join(chr(i) for i in range(128))
    request = make_request(max_tokens=max_tokens, stop=stop, stop_token_ids=stop_token_ids)
    monitor = StopMonitor(request, (EOS,), Letters(alphabet, lag))
    shown: list[str] = []
    for character in text:
        shown.append(monitor.push(ord(character)))
        if monitor.finish_reason:
            break
    return shown, monitor.finish_reason, monitor.num_tokens


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize(
    ("text", "options", "want", "reason"),
    [
        ("Now ready, steady go\0", {"stop": ("ready, steady",)}, "Now ", "stop"),
        ("Now ready, set\0", {"stop": ("ready, steady",)}, "Now ready, set", "stop"),
        ("one <end> two", {"stop": ("<end>",)}, "one ", "stop"),
        ("this is a test\0", {"stop": ("### Question",)}, "this is a test", "stop"),
        ("go on\0", {"stop": ("### Question",)}, "go on", "stop"),
        ("ends in ##\0", {"stop": ("### Question",)}, "ends in ##", "stop"),
        ("All is well.\0", {"stop_token_ids": (EOS,)}, "All is well.", "stop"),
        ("aab\0", {"stop": ("ab",)}, "a", "stop"),
        ("abcabd!\0", {"stop": ("abd",)}, "abc", "stop"),
        ("xyz\0", {"stop": ("z", "yz")}, "x", "stop"),
        ("abcdef", {"max_tokens": 3}, "abc", "length"),
        ("abc##", {"stop": ("###",), "max_tokens": 5}, "abc##", "length"),
    ],
)
def test_text_and_reason(text: str, options: dict, want: str, reason: str, lag: int) -> None:
    """K03 rows 23, 25, 27, 29."""
    shown, got_reason, _ = feed(text, lag=lag, **options)
    assert ("".join(shown), got_reason) == (want, reason)


def test_only_true_prefixes_of_a_stop_are_held_back() -> None:
    """K03 rows 25, 27: 'Now ' is shown at once; 'ready, s' is held until the match is decided."""
    shown, _, _ = feed("Now ready, set go\0", stop=("ready, steady",))
    assert "".join(shown[:4]) == "Now " and "".join(shown[:12]) == "Now "
    assert "".join(shown[:14]) == "Now ready, set"
    shown, _, _ = feed("a question on it\0", stop=("### Question",))
    assert all(len(piece) == 1 for piece in shown[:-1])


def test_a_stop_that_completes_with_the_last_token_is_a_stop() -> None:
    """K03 row 21."""
    shown, reason, num_tokens = feed("abc<end>", stop=("<end>",), max_tokens=8)
    assert ("".join(shown), reason, num_tokens) == ("abc", "stop", 8)
    _, reason, _ = feed("abcd\0", max_tokens=5)
    assert reason == "stop"


@pytest.mark.parametrize("at", range(6))
async def test_eos_anywhere_in_an_accepted_block(at: int) -> None:
    """K03 row 19: nothing after EOS in any chunk, usage or count; one finish_reason, on the last chunk."""
    vocab = 12
    script = [3, 4, 5, 6, 7, 8, 9]
    tokens = [*script[:at], EOS, *script[at:]]

    def logits(prefix: tuple[int, ...]):
        row = random_table(vocab)(prefix).copy()
        row[tokens[len(prefix) - 1] if len(prefix) - 1 < len(tokens) else 1] = 50.0
        return row

    verifier = TableVerifier(logits, vocab, eos_token_ids=(EOS,))
    drafter = ScriptedDrafter(greedy_script(logits), vocab)
    stream = decode(
        make_request([1], max_tokens=20), DecodeConfig(policy=Static(6)), Direct(drafter), Direct(verifier), tier="t",
        detokenizer=Letters("abcdefghijkl"),
    )  # fmt: skip
    chunks: list[TokenChunk] = [chunk async for chunk in stream]
    got = [token for chunk in chunks for token in chunk.token_ids]
    assert got == tokens[: at + 1]  # EOS itself is a generated token, as in vLLM
    assert "".join(chunk.text for chunk in chunks) == "".join("abcdefghijkl"[t] for t in script[:at])
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    receipt = chunks[-1].receipt
    assert receipt is not None and receipt.num_tokens == at + 1
    assert receipt.num_accepted_tokens <= receipt.num_tokens  # K06 row 37


async def test_ignore_eos_goes_on() -> None:
    table = random_table(8, order=2)
    verifier = TableVerifier(table, 8, eos_token_ids=tuple(range(8)))
    request = make_request([1], max_tokens=5, ignore_eos=True)
    chunks = [chunk async for chunk in decode(request, DecodeConfig(), None, Direct(verifier), tier="t")]
    assert [t for c in chunks for t in c.token_ids] == plain_greedy(table, [1], 5)
    assert chunks[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("text", "min_tokens", "expected"),
    [
        ("ab--cd--ef", 0, ("ab", "stop")),
        ("ab--cd--ef", 3, ("ab", "stop")),  # it ends with the fourth token
        ("ab--cd--ef", 4, ("ab--cd", "stop")),
        ("ab---", 4, ("ab-", "stop")),  # ends after min_tokens, begins before
        ("ab--", 4, ("ab--", None)),
        ("ab\0cd\0", 3, ("abcd", "stop")),
        ("ab\0cd\0", 2, ("ab", "stop")),
    ],
)
def test_nothing_stops_before_min_tokens(text: str, min_tokens: int, expected: tuple[str, str | None]) -> None:
    request = make_request(max_tokens=100, stop=("--",), processing=LogitProcessing(min_tokens=min_tokens))
    monitor = StopMonitor(request, (EOS,), Letters("".join(chr(i) for i in range(128))))
    shown = ""
    for character in text:
        shown += monitor.push(ord(character))
        if monitor.finish_reason is not None:
            break
    shown += monitor._held if monitor.finish_reason is None else ""
    assert (shown, monitor.finish_reason) == expected
