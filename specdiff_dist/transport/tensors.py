"""Arrays <-> protobuf tensors, exact to the bit. Decoding trusts no length: the bytes must be what dtype and shape say."""

from __future__ import annotations

import math

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from specdiff_dist.pb import roles_pb2 as pb

MAX_DIMENSIONS = 4

_WIRE_DTYPES = {
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_FLOAT64: np.dtype("<f8"),
    pb.DTYPE_FLOAT16: np.dtype("<f2"),
    pb.DTYPE_BFLOAT16: np.dtype("<u2"),  # its bits: NumPy has no such type
}
_HOST_DTYPES = {dtype: dtype.newbyteorder("=") for dtype in _WIRE_DTYPES.values()}
_WIRE_CODES = {_HOST_DTYPES[dtype]: code for code, dtype in _WIRE_DTYPES.items()}


class Malformed(Exception):
    """Bytes that do not hold what they should; says what is wrong."""


def tensor_to_pb(array: NDArray) -> pb.Tensor:
    """Sends the array's own dtype: the receiver judges it, and no number changes on the way."""
    code = _WIRE_CODES.get(array.dtype) or _WIRE_CODES.get(array.dtype.newbyteorder("="))
    if code is None:
        raise Malformed(f"{array.dtype} array; use {', '.join(map(str, _WIRE_CODES))}")
    return pb.Tensor(dtype=code, shape=array.shape, data=array.astype(_WIRE_DTYPES[code], copy=False).tobytes())


def array_of(message: Message, field: str) -> NDArray:
    """The tensor in `field` as an array of its own, writable memory."""
    if not message.HasField(field):
        raise Malformed(f"{field} is missing")
    tensor: pb.Tensor = getattr(message, field)
    dtype, shape, data = _WIRE_DTYPES.get(tensor.dtype), tuple(tensor.shape), tensor.data
    if dtype is None or len(shape) > MAX_DIMENSIONS:
        raise Malformed(f"{field}: dtype {tensor.dtype} with {len(shape)} dimensions")
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise Malformed(f"{field}: {len(data)} bytes for {dtype.name} {list(shape)}")
    array = np.frombuffer(data, dtype).astype(_HOST_DTYPES[dtype])
    return array if len(shape) == 1 else array.reshape(shape)
