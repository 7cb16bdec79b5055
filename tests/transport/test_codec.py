"""Bytes that are not what they should be. (That right ones arrive bit for bit, test_contract.py shows.)"""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_strategies

from specdiff_dist.core.rows import SparseRows
from specdiff_dist.errors import InvalidRequest, InvalidRows, SpecdiffError
from specdiff_dist.pb import roles_pb2 as pb
from specdiff_dist.transport import codec
from specdiff_dist.types import DrafterInfo, TargetRows
from tests.transport.doubles import draft_call, same_arrays, scripted_drafter, table_verifier, verify_call

DTYPES = [np.int32, np.int64, np.float32, np.float64, np.float16, np.uint16]
DECODERS = [
    codec.decode_draft_call,
    codec.decode_verify_call,
    codec.decode_release,
    codec.decode_draft_block,
    codec.decode_target_rows,
    codec.decode_drafter_info,
    codec.decode_verifier_info,
]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES).flatmap(lambda dtype: numpy_strategies.arrays(dtype, st.integers(0, 40))))
def test_any_array_survives_bit_for_bit(array):
    """Any bit pattern: NaN payloads, infinities, denormals."""
    reply = TargetRows(SparseRows.from_rows([]), array, None, None, 5)
    assert same_arrays(codec.decode_target_rows(codec.encode_target_rows(reply)), reply)


def test_arrays_of_another_byte_order_or_stride_survive():
    for array in (np.arange(5, dtype=">f8"), np.arange(10, dtype=np.float64)[::2]):
        reply = TargetRows(SparseRows.from_rows([]), array, None, None, 5)
        decoded = codec.decode_target_rows(codec.encode_target_rows(reply)).row_mass
        np.testing.assert_array_equal(decoded, array)
        assert decoded.dtype.isnative


def test_a_drafters_calibration_travels_exactly():
    table = tuple(tuple(np.linspace(0.1 * row, 0.9, 16).tolist()) for row in range(3))
    info = DrafterInfo("d", 9, 8, 7, ("left_to_right",), False, True, calibration=table)
    assert codec.decode_drafter_info(codec.encode_drafter_info(info)) == info


def test_a_calibration_that_is_no_table_of_numbers_is_refused():
    message = pb.DrafterInfo(name="d")
    message.calibration.CopyFrom(pb.Tensor(dtype=pb.DTYPE_INT32, shape=[1], data=b"\1\0\0\0"))
    with pytest.raises(InvalidRows, match="calibration"):
        codec.decode_drafter_info(message.SerializeToString())


def verify_request() -> pb.VerifyRequest:
    return pb.VerifyRequest.FromString(codec.encode_verify_call(verify_call()))


def broken_tensors() -> dict[str, pb.Tensor]:
    good = pb.Tensor(dtype=pb.DTYPE_INT32, shape=[3], data=b"\1\0\0\0" * 3)
    broken = {
        name: pb.Tensor.FromString(good.SerializeToString()) for name in ("short", "long", "wide", "deep", "none")
    }
    broken["short"].data = good.data[:-1]
    broken["long"].shape[:] = [2**32 - 1]
    broken["wide"].shape[:] = [2**32 - 1] * 4
    broken["deep"].shape[:] = [3, 1, 1, 1, 1]
    broken["none"].dtype = pb.DTYPE_UNSPECIFIED
    broken["unknown"] = pb.Tensor.FromString(good.SerializeToString().replace(b"\x08\x01", b"\x08\x63", 1))
    return broken


@pytest.mark.parametrize("name", broken_tensors())
def test_a_tensor_that_contradicts_itself_is_refused(name):
    request = verify_request()
    request.draft_token_ids.CopyFrom(broken_tensors()[name])
    with pytest.raises(InvalidRequest, match="draft_token_ids"):
        codec.decode_verify_call(request.SerializeToString())


def test_a_missing_part_is_refused():
    for field in ("prefix", "draft_token_ids", "sampling", "target_uniforms"):
        request = verify_request()
        request.ClearField(field)
        with pytest.raises(InvalidRequest):
            codec.decode_verify_call(request.SerializeToString())
    request = pb.DraftRequest.FromString(codec.encode_draft_call(draft_call()))
    request.seed = b"12345678"
    with pytest.raises(InvalidRequest, match="seed"):
        codec.decode_draft_call(request.SerializeToString())


def test_a_reply_with_tokens_but_no_proposals_is_refused():
    reply = pb.DraftReply.FromString(codec.encode_draft_block(scripted_drafter().draft(draft_call())))
    reply.ClearField("proposals")
    with pytest.raises(InvalidRows, match="row_splits is missing"):
        codec.decode_draft_block(reply.SerializeToString())


@pytest.mark.parametrize("temperature", [float("nan"), float("inf"), -1.0])
def test_sampling_out_of_range_is_refused(temperature):
    request = verify_request()
    request.sampling.temperature = temperature
    with pytest.raises(InvalidRequest, match="temperature"):
        codec.decode_verify_call(request.SerializeToString())


def test_what_does_not_fit_its_field_is_not_sent():
    call = verify_call()
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        codec.encode_release("\ud800")
    object.__setattr__(call, "target_uniforms", call.target_uniforms.astype(np.uint8))
    with pytest.raises(InvalidRequest, match="uint8"):
        codec.encode_verify_call(call)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(DECODERS))
def test_random_bytes_give_a_value_or_one_of_our_errors(data, decode):
    with contextlib.suppress(SpecdiffError):
        decode(data)


def test_a_call_shorter_by_any_number_of_bytes_gives_one_of_our_errors():
    data = codec.encode_verify_call(verify_call())
    reply = codec.encode_target_rows(table_verifier().verify(verify_call()))
    for length in range(len(data)):
        with pytest.raises(InvalidRequest):
            codec.decode_verify_call(data[:length])
    for length in range(len(reply) // 2):
        with pytest.raises(InvalidRows):
            codec.decode_target_rows(reply[:length])


def test_wide_rows_leave_out_what_the_caller_has():
    call = verify_call()
    wide = table_verifier(wide=True).verify(call)
    data, whole = codec.encode_target_rows(wide, call.proposals), codec.encode_target_rows(wide)
    assert len(whole) - len(data) > 4 * len(wide.rows.token_ids)
    assert same_arrays(codec.decode_target_rows(data, call.proposals), wide)
    assert same_arrays(codec.decode_target_rows(whole, call.proposals), wide)
    with pytest.raises(InvalidRows, match="row_splits is missing"):
        codec.decode_target_rows(data)
    narrow = table_verifier().verify(call)
    assert same_arrays(
        codec.decode_target_rows(codec.encode_target_rows(narrow, call.proposals), call.proposals), narrow
    )


def test_wide_rows_on_another_support_are_sent_with_it():
    """So that the caller finds the mistake."""
    call = verify_call()
    wide = table_verifier(wide=True).verify(call)
    wrong = dataclasses.replace(wide, rows=wide.rows.head(2))
    assert same_arrays(codec.decode_target_rows(codec.encode_target_rows(wrong, call.proposals), call.proposals), wrong)
