"""One large field of a protobuf message, taken out or put in without a copy by the library for each level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError

from treeline_epp.requests.body import Buffer

_LENGTH_DELIMITED = 2
_FIXED = {1: 8, 5: 4}


def field_numbers(descriptor: Any, *names: str) -> tuple[int, ...]:
    """The numbers of a path of fields, each in the message of the one before."""
    numbers = []
    for name in names:
        field = descriptor.fields_by_name[name]
        numbers.append(field.number)
        descriptor = field.message_type
    return tuple(numbers)


def take_field(message: memoryview, number: int) -> tuple[bytes, memoryview | None]:
    """A serialized message without its length-delimited field `number`, and the field's last value (None: absent).

    O(fields) and the bytes of the other fields. Raises `DecodeError`.
    """
    rest = bytearray()
    found: memoryview | None = None
    at, size = 0, len(message)
    while at < size:
        begin = at
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _LENGTH_DELIMITED:
            length, at = _varint(message, at)
            at += length
        elif kind == 0:
            length, at = 0, _varint(message, at)[1]
        elif kind in _FIXED:
            length, at = 0, at + _FIXED[kind]
        else:
            raise DecodeError(f"field of unknown wire type {kind}")
        if at > size:
            raise DecodeError("a field is longer than its message")
        if kind == _LENGTH_DELIMITED and tag >> 3 == number:
            found = message[at - length : at]
        else:
            rest += message[begin:at]
    return bytes(rest), found


def with_field(message: bytes, path: Sequence[int], value: Sequence[Buffer]) -> bytes:
    """A serialized message with the bytes `value` (in pieces) at `path`, whose field must be unset. One copy.

    Messages that are written one after another are read as one, so the path is simply written behind the rest.
    """
    length = sum(map(len, value))
    heads: list[bytes] = []
    for number in reversed(path):
        head = _packed(number << 3 | _LENGTH_DELIMITED) + _packed(length)
        heads.append(head)
        length += len(head)
    return b"".join([message, *reversed(heads), *value])


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise DecodeError("a number does not end")


def _packed(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
