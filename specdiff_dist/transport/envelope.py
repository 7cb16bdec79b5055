"""Dataclasses <-> msgpack, for what crosses Serve handles and for files. No pickle: unpacking builds known types only.

A dataclass becomes {"type": its name, field: value, …}; what a field may hold is read from its annotation. A new rule,
policy or field therefore needs no line here.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, Union, cast

import msgpack

from specdiff_dist.config import DecodeConfig
from specdiff_dist.errors import InvalidConfig, InvalidRequest, SpecdiffError

ValueT = TypeVar("ValueT")
Read = Callable[[Any, str], Any]  # (unpacked value, where it stands) -> typed value; raises _Mismatch

_CONFIG_TYPES = (DecodeConfig,)  # what is wrong inside them is InvalidConfig; anywhere else it is InvalidRequest


class _Mismatch(Exception):
    """A value that its annotation does not allow."""


def pack(value: Any) -> bytes:
    """Raises InvalidRequest for an integer beyond 64 bits."""
    try:
        return cast(bytes, msgpack.packb(_plain(value)))
    except (OverflowError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"cannot be packed: {error}") from error


def unpack(data: bytes, kind: type[ValueT]) -> ValueT:
    """The dataclass `kind` in `data`, every field present and of its declared type.

    Raises InvalidConfig for anything wrong inside a DecodeConfig, else InvalidRequest, naming the place.
    """
    error: type[SpecdiffError] = InvalidConfig if kind in _CONFIG_TYPES else InvalidRequest
    try:
        plain = msgpack.unpackb(data)
    except ValueError as reason:  # msgpack's own errors and broken UTF-8 are ValueErrors
        raise error(f"malformed {kind.__name__}: {reason}") from reason
    try:
        return _reader(kind)(plain, kind.__name__)
    except _Mismatch as reason:
        raise error(str(reason)) from reason


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        return [_plain(item) for item in value]
    return value  # tuples of numbers and strings as they are: a long prompt is not walked in Python


@cache
def _reader(annotation: Any) -> Read:
    """How to read a value of `annotation`; made once per annotation."""
    if dataclasses.is_dataclass(annotation):
        return _dataclass_reader((annotation,))
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return _union_reader(typing.get_args(annotation))
    if typing.get_origin(annotation) is tuple and typing.get_args(annotation)[1:] == (...,):
        return _tuple_reader(_reader(typing.get_args(annotation)[0]))
    return _scalar_reader(annotation)


def _union_reader(members: tuple[Any, ...]) -> Read:
    """`A | B` of dataclasses, told apart by their tag, or `X | None`."""
    some = tuple(member for member in members if member is not type(None))
    read_some = _dataclass_reader(some) if dataclasses.is_dataclass(some[0]) else _reader(some[0])
    if len(some) == len(members):
        return read_some
    return lambda value, where: None if value is None else read_some(value, where)


def _dataclass_reader(kinds: tuple[Any, ...]) -> Read:
    by_name = {kind.__name__: kind for kind in kinds}

    def read(value: Any, where: str) -> Any:
        tag = value.get("type") if isinstance(value, dict) else None
        kind = by_name.get(tag) if isinstance(tag, str) else None
        if kind is None:
            raise _Mismatch(f"{where} must be {' or '.join(by_name)}, not {tag!r}")
        fields = _field_readers(kind)
        if value.keys() - {"type"} != fields.keys():
            raise _Mismatch(f"{where}: a {kind.__name__} has the fields {', '.join(fields) or '(none)'}")
        try:
            return kind(**{name: read_field(value[name], f"{where}.{name}") for name, read_field in fields.items()})
        except _Mismatch as error:
            if kind in _CONFIG_TYPES:
                raise InvalidConfig(str(error)) from error
            raise

    return read


@cache
def _field_readers(kind: Any) -> dict[str, Read]:
    hints = typing.get_type_hints(kind)
    return {field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind)}


def _tuple_reader(read_item: Read) -> Read:
    def read(value: Any, where: str) -> tuple:
        if not isinstance(value, list):
            raise _Mismatch(f"{where} must be a list, not {type(value).__name__}")
        return tuple([read_item(item, where) for item in value])

    return read


def _scalar_reader(kind: Any) -> Read:
    if kind not in (str, int, float, bool, bytes):
        raise TypeError(f"the envelope has no form for {kind}")

    def read(value: Any, where: str) -> Any:
        if type(value) is kind:
            return value
        if kind is float and type(value) is int:  # Linear(0) is a fair way to write it
            return float(value)
        raise _Mismatch(f"{where} must be {kind.__name__}, not {type(value).__name__}")

    return read
