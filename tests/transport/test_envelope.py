from __future__ import annotations

import dataclasses
import pickle
import typing
from typing import cast

import msgpack
import numpy as np
import pytest

from specdiff_dist.config import TIERS, ConfidenceThreshold, DecodeConfig, Effort, Linear, Off, Policy, Rule, Static
from specdiff_dist.core.logit_processing import LogitProcessing
from specdiff_dist.core.logprobs import TokenLogprob
from specdiff_dist.errors import InvalidConfig, InvalidRequest
from specdiff_dist.transport.envelope import pack, unpack
from specdiff_dist.types import (
    CallCost,
    DrafterInfo,
    GenerateRequest,
    Receipt,
    RoundRecord,
    SamplingParams,
    TokenChunk,
    VerifierInfo,
)

REQUEST = GenerateRequest("id", (1, 2, 2**31), SamplingParams(0.1 + 0.2, 5, 0.9), -(2**63), 7, ("\n", "é"), (0,), True)
CONFIG = DecodeConfig(Linear(1 / 3), Effort(3, "entropy", "one_hot"), ConfidenceThreshold(0.1, 5), None, 9)
RECEIPT = Receipt(
    "fast", CONFIG, 3, 12, 8, (0, 1, 2), 11, 5e-324, float("inf"), 0.1, None, 1, exact=False, degraded=True, verifier_rebuilds=2
)  # fmt: skip
CHUNK = TokenChunk(
    (5, 0), "ab\u2028", "stop", RECEIPT, (RoundRecord(4, 3, 2, CallCost(0.1), CallCost(), 0.2, 0.3, True),) * 2
)
ASKING = dataclasses.replace(
    REQUEST,
    max_tokens=9,
    num_logprobs=3,
    processing=LogitProcessing(0.5, -1.0, 1.3, (5, 0), (1 / 3, -100.0), 9, (2, 1)),
)
LOGPROBS = (TokenLogprob(-1 / 3, (5, 0), (-0.1, float("-inf"))), TokenLogprob(float("-inf"), (), ()))
VALUES = [
    ASKING, TokenChunk((5, 0), "ab", logprobs=LOGPROBS), REQUEST, CONFIG, *TIERS.values(), CHUNK, TokenChunk((), ""), RECEIPT,
    DrafterInfo("d", 9, 8, 7, ("left_to_right",), True, False), VerifierInfo("v", 9, 8, (), "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_round_trip(value):
    """repr, because it tells floats apart to the last bit and tuples from lists."""
    again = unpack(pack(value), type(value))
    assert again == value
    assert repr(again) == repr(value)


@pytest.mark.parametrize("kind", [*typing.get_args(Rule), *typing.get_args(Policy)])
def test_every_rule_and_policy_travels(kind):
    """A new member of the unions is covered without a line here."""
    examples = {int: 3, float: 0.25, str: "max_prob"}
    hints = typing.get_type_hints(kind)
    given = {"gamma": "taylor"}
    value = kind(
        **{field.name: given.get(field.name, examples[hints[field.name]]) for field in dataclasses.fields(kind)}
    )
    config = DecodeConfig(rule=value) if kind in typing.get_args(Rule) else DecodeConfig(policy=value)
    assert unpack(pack(config), DecodeConfig) == config


def test_a_whole_number_is_a_float_where_one_is_declared():
    assert unpack(pack(DecodeConfig(Linear(0))), DecodeConfig).rule == Linear(0.0)


def changed(value: object, path: tuple[str, ...], new: object) -> bytes:
    """`value` packed, with the field at `path` replaced (or removed, if `new` is ...)."""
    plain = msgpack.unpackb(pack(value))
    inner = plain
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = new
    if new is ...:
        del inner[path[-1]]
    return cast(bytes, msgpack.packb(plain))


@pytest.mark.parametrize(
    ("path", "new"),
    [
        (("type",), "TokenChunk"),
        (("type",), ["GenerateRequest"]),
        (("type",), ...),
        (("sampling", "type"), "Effort"),
        (("sampling",), None),
        (("seed",), ...),
        (("surprise",), 1),
        (("seed",), "1"),
        (("seed",), 1.0),
        (("seed",), True),
        (("ignore_eos",), 1),
        (("stop",), "abc"),
        (("stop",), [b"abc"]),
        (("prompt_token_ids",), [1, 2.5]),
        (("prompt_token_ids",), []),
        (("sampling", "temperature"), float("nan")),
        (("max_tokens",), 0),
    ],
    ids=repr,
)
def test_a_malformed_request_is_refused(path, new):
    with pytest.raises(InvalidRequest):
        unpack(changed(REQUEST, path, new), GenerateRequest)


@pytest.mark.parametrize(
    ("path", "new"),
    [
        (("rule", "type"), "Sloppy"),
        (("rule", "type"), "Static"),
        (("rule", "leniency"), 1.5),
        (("rule", "leniency"), "0.1"),
        (("rule",), "lossless"),
        (("policy", "type"), "Effort"),
        (("policy", "length"), 0),
        (("effort", "reveal_order"), "random"),
        (("draft_temperature",), "cold"),
    ],
    ids=repr,
)
def test_a_malformed_config_is_refused_alone_and_inside(path, new):
    with pytest.raises(InvalidConfig):
        unpack(changed(CONFIG, path, new), DecodeConfig)
    with pytest.raises(InvalidConfig):
        unpack(changed(CHUNK, ("receipt", "config", *path), new), TokenChunk)


def test_the_message_names_the_place():
    with pytest.raises(InvalidConfig, match=r"DecodeConfig\.rule must be Lossless or Linear or .*'Sloppy'"):
        unpack(changed(CONFIG, ("rule", "type"), "Sloppy"), DecodeConfig)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", pickle.dumps(REQUEST), pack(REQUEST)[:-1], pack(REQUEST) + b"\0", b"\x91" * 5000, msgpack.packb(7)],
    ids=["empty", "reserved byte", "pickle", "cut off", "a byte more", "nested too deep", "a number"],
)
def test_other_bytes_are_refused(data):
    with pytest.raises(InvalidRequest):
        unpack(data, GenerateRequest)


def test_an_integer_beyond_64_bits_is_refused():
    with pytest.raises(InvalidRequest):
        pack(dataclasses.replace(REQUEST, seed=2**70))


def test_off_and_static_are_told_apart():
    assert unpack(pack(DecodeConfig(policy=Off())), DecodeConfig).policy == Off()
    assert unpack(pack(DecodeConfig(policy=Static(2))), DecodeConfig).policy == Static(2)


def test_numpy_numbers_are_not_packed_in_silence():
    with pytest.raises(TypeError):
        pack(dataclasses.replace(REQUEST, seed=np.int64(3)))
