"""Minimal reader of the Protocol Buffers wire format: fields by number.

For messages of which only a few fields are read, whose numbers never change: neither the protobuf
runtime nor generated classes have to be installed.
https://protobuf.dev/programming-guides/encoding/
"""

import struct
from typing import Any

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def fields(message: bytes) -> dict[int, list[Any]]:
    """Return the values by field: ints for varints, bytes for all others. Raises ValueError."""
    values: dict[int, list[Any]] = {}
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        value: Any
        if key & 7 == VARINT:
            value, at = _varint(message, at)
        elif key & 7 == BYTES:
            length, at = _varint(message, at)
            value, at = message[at : at + length], at + length
        elif key & 7 in (FIXED64, FIXED32):
            length = 8 if key & 7 == FIXED64 else 4
            value, at = message[at : at + length], at + length
        else:
            raise ValueError(f"a field is of wire type {key & 7}")
        if at > len(message):
            raise ValueError("a message is truncated")
        values.setdefault(key >> 3, []).append(value)
    return values


def to_signed(number: int) -> int:
    """Convert a varint to int32 or int64: negative numbers are written as 64 bits."""
    return number - 2**64 if number >= 2**63 else number


def zigzag(number: int) -> int:
    """Decode a varint of type sint32 or sint64."""
    return (number >> 1) ^ -(number & 1)


def double(value: bytes) -> float:
    """Decode a double."""
    return float(struct.unpack("<d", value)[0])


def _varint(message: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError("a message is truncated")
        byte = message[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return number, at
