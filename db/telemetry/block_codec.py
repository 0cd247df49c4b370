"""Steps and metrics as bytes: the content of a block, and the summaries that it carries.

    data   u8 format, u32 CRC-32 of all that follows; then
           RECORDS: packed records of the spool, as a flush brought them; or
           COLUMNS: u32 number of steps, for each of NAMES one `_HEAD`, then for each its frame
    lows   u8 format, u32 CRC-32 of all that follows; u32 number; the numbers of the buckets as a
           frame of integers with its `_HEAD`, then the packed summaries, byte by byte, by zlib

Blocks of metrics are COLUMNS of `metric_points.NAMES`; FLUSH, FLUSHES and METRIC_LOWS are described
in db.telemetry.metric_points and metric_blocks.

A frame is shuffled, all first bytes first, and compressed by zlib. Each byte of floats begins a
block of zlib, which stores noise as it is. Integers are stored as their differences to the one
before, those of `lr` as the differences of the differences of its bits; floats take four bytes if
that changes none of them. All numbers are little-endian.
"""

import struct
import zlib
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

#: Columns of steps, all in order of step. An unknown value and NaN are NaN: `flags` says which.
#: grad_norm_clipped is NaN where the clip changed nothing.
Columns: TypeAlias = dict[str, NDArray[Any]]
Integers = NDArray[np.int64]
Records: TypeAlias = NDArray[np.void]

WHOLE = ("step", "elapsed_ms", "step_us", "flags", "owner")
NAMES = (
    *("step", "elapsed_ms", "step_us", "flags", "data_us", "lr"),
    *("loss", "scale", "grad_norm", "grad_norm_clipped"),
)
#: How often the differences of an integer column are taken.
DIFFERENCES = {"step": 1, "elapsed_ms": 1, "owner": 1, "lr": 2}
UNKNOWN_US = -1
#: A step as the spool has it, and so a small part of a run's tail.
RECORD = np.dtype(
    [
        *(("step", "<i8"), ("elapsed_ms", "<i8"), ("step_us", "<i4"), ("loss", "<f4")),
        *(("scale", "<f4"), ("grad_norm", "<f4"), ("grad_norm_clipped", "<f4"), ("lr", "<f8")),
        *(("flags", "<u4"), ("data_us", "<i4")),
    ]
)
RECORDS, COLUMNS, LOWS = 1, 2, 3
#: Forms of metric points, see db.telemetry.metric_points and db.telemetry.metric_blocks.
FLUSH, FLUSHES, METRIC_LOWS = 4, 5, 6
LEVEL = 6

_START = struct.Struct("<BI")
_NUMBER = struct.Struct("<I")
#: Bytes of a value, number of values that begin the differences, bytes of the frame.
_HEAD = struct.Struct("<BBI")


class Damaged(Exception):
    """Bytes of a block are not those that were written."""


def empty() -> Columns:
    """Return the columns of no steps."""
    return {name: np.empty(0, np.int64 if name in WHOLE else np.float64) for name in NAMES}


def join(parts: Sequence[Columns], names: Collection[str] = NAMES) -> Columns:
    """Concatenate columns of steps."""
    if len(parts) == 1:
        return {name: parts[0][name] for name in names}
    none = empty()
    return {name: np.concatenate([none[name], *(part[name] for part in parts)]) for name in names}


def chosen(columns: Columns, which: Any) -> Columns:
    """Return the steps that an index or a mask selects."""
    return {name: values[which] for name, values in columns.items()}


def are_equal(some: Columns, others: Columns, names: Collection[str] = NAMES) -> bool:
    """Return whether steps are the same to the bit; all NaN are equal."""
    return all(np.array_equal(_bits(name, some[name]), _bits(name, others[name])) for name in names)


def _bits(name: str, values: NDArray[np.generic]) -> NDArray[np.generic]:
    return values if name in WHOLE else _with_one_nan(values).view(np.int64)


def _with_one_nan(values: NDArray[np.generic]) -> NDArray[np.generic]:
    return np.where(np.isnan(values), np.nan, values)


def to_list(name: str, values: NDArray[np.generic]) -> list[object]:
    """Return a column as a list, with None for NaN."""
    found: list[Any] = values.tolist()
    if name in WHOLE:
        return found
    convert = int if name == "data_us" else float
    return [None if value != value else convert(value) for value in found]


def rows(columns: Columns) -> list[dict[str, Any]]:
    """Return steps as rows of the table of steps."""
    lists = [to_list(name, columns[name]) for name in NAMES]
    return [dict(zip(NAMES, row, strict=True)) for row in zip(*lists, strict=True)]


def of_records(records: Records, names: Collection[str] = NAMES) -> Columns:
    """Return columns of records of the spool."""
    columns = {
        name: records[name].astype(np.int64 if name in WHOLE else np.float64) for name in names
    }
    if "data_us" in columns:
        columns["data_us"][columns["data_us"] < 0] = np.nan
    return columns


def encode_records(records: Records) -> bytes:
    """Return the bytes of a few steps as they are."""
    return add_checksum(RECORDS, records.astype(RECORD).tobytes())


def join_records(parts: Sequence[bytes]) -> bytes:
    """Return the bytes of consecutive parts from `encode_records` as one. Raises Damaged."""
    return add_checksum(RECORDS, b"".join(content_of(part)[1] for part in parts))


def encode(columns: Columns, layout: Sequence[str] = NAMES) -> bytes:
    """Return the compressed bytes of steps, or of points with the columns of `layout`."""
    heads, frames = [], []
    for name in layout:
        head, frame = _encode_column(name, columns[name])
        heads.append(head)
        frames.append(frame)
    number = _NUMBER.pack(len(columns["step"]))
    return add_checksum(COLUMNS, b"".join([number, *heads, *frames]))


def decode(data: bytes, names: Collection[str] = NAMES, layout: Sequence[str] = NAMES) -> Columns:
    """Return columns of the steps in these bytes. layout: as given to `encode`. Raises Damaged."""
    kind, content = content_of(data)
    if kind == RECORDS:
        return of_records(np.frombuffer(content, RECORD), names)
    if kind != COLUMNS:
        raise Damaged(f"its format is {kind}; this version reads {RECORDS} and {COLUMNS}")
    [number] = _NUMBER.unpack_from(content)
    at = _NUMBER.size + len(layout) * _HEAD.size
    columns = {}
    for index, name in enumerate(layout):
        size, firsts, length = _HEAD.unpack_from(content, _NUMBER.size + index * _HEAD.size)
        if name in names:
            columns[name] = _decode_column(name, content[at : at + length], size, firsts, number)
        at += length
    return columns


def is_intact(data: bytes) -> bool:
    """Return whether bytes are those that were written."""
    try:
        return content_of(data)[0] in range(RECORDS, METRIC_LOWS + 1)
    except Damaged:
        return False


def encode_lows(buckets: Integers, packed: Sequence[bytes]) -> bytes:
    """Return the bytes of packed summaries. buckets: their numbers, in order."""
    head, frame = _encode_integers(buckets, 1)
    rows = np.frombuffer(b"".join(packed), np.uint8).reshape(len(packed), -1)
    summaries = zlib.compress(np.ascontiguousarray(rows.T).tobytes(), LEVEL)
    return add_checksum(LOWS, b"".join([_NUMBER.pack(len(packed)), head, frame, summaries]))


def decode_lows(lows: bytes) -> tuple[Integers, list[bytes]]:
    """Return the numbers of buckets and their packed summaries. Raises Damaged."""
    kind, content = content_of(lows)
    if kind != LOWS:
        raise Damaged(f"its format is {kind}; this version reads {LOWS}")
    [number] = _NUMBER.unpack_from(content)
    size, firsts, length = _HEAD.unpack_from(content, _NUMBER.size)
    at = _NUMBER.size + _HEAD.size
    buckets = _decode_integers(content[at : at + length], size, firsts, number)
    rows = np.frombuffer(zlib.decompress(content[at + length :]), np.uint8)
    rows = np.ascontiguousarray(rows.reshape(-1, number).T)
    return buckets, rows.view(f"V{rows.shape[1]}").ravel().tolist()


def add_checksum(kind: int, content: bytes) -> bytes:
    """Return bytes with their format and checksum."""
    return _START.pack(kind, zlib.crc32(content)) + content


def content_of(data: bytes) -> tuple[int, bytes]:
    """Return the format and the content of bytes from `add_checksum`. Raises Damaged."""
    if len(data) < _START.size:
        raise Damaged("it is too short")
    (kind, checksum), content = _START.unpack_from(data), data[_START.size :]
    if zlib.crc32(content) != checksum:
        raise Damaged("its checksum differs")
    return kind, content


def _encode_column(name: str, values: NDArray[Any]) -> tuple[bytes, bytes]:
    if name in WHOLE:
        return _encode_integers(values, DIFFERENCES.get(name, 0))
    if name == "data_us":
        whole = np.where(np.isnan(values), UNKNOWN_US, values).astype(np.int64)
        return _encode_integers(whole, 0)
    values = _with_one_nan(values)
    if name == "lr":
        return _encode_integers(values.view(np.int64), DIFFERENCES[name])
    with np.errstate(over="ignore"):
        short = values.astype("<f4")
    if np.array_equal(short.astype(np.float64), values, equal_nan=True):
        values = short
    size, coder, frame = values.dtype.itemsize, zlib.compressobj(LEVEL), b""
    for place in np.frombuffer(_shuffle(values), np.uint8).reshape(size, -1):
        frame += coder.compress(place.tobytes()) + coder.flush(zlib.Z_BLOCK)
    frame += coder.flush()
    return _HEAD.pack(size, 0, len(frame)), frame


def _decode_column(name: str, frame: bytes, size: int, firsts: int, number: int) -> NDArray[Any]:
    if name in WHOLE:
        return _decode_integers(frame, size, firsts, number)
    if name == "data_us":
        whole = _decode_integers(frame, size, firsts, number)
        return np.where(whole == UNKNOWN_US, np.nan, whole.astype(np.float64))
    if name == "lr":
        return _decode_integers(frame, size, firsts, number).view(np.float64)
    values = _unshuffle(zlib.decompress(frame), np.dtype(f"<f{size}"))
    return values.astype(np.float64)


def _encode_integers(values: Integers, differences: int) -> tuple[bytes, bytes]:
    """Return head and frame of integers; those that begin the differences precede the frame."""
    values, firsts = values.astype(np.int64), []
    for _ in range(min(differences, len(values))):
        firsts.append(values[:1])
        values = np.diff(values)
    zigzag = ((values << 1) ^ (values >> 63)).view(np.uint64)
    most = int(zigzag.max(initial=0))
    size = next(size for size in (1, 2, 4, 8) if most < 2 ** (8 * size))
    frame = b"".join(first.astype("<i8").tobytes() for first in firsts)
    frame += zlib.compress(_shuffle(zigzag.astype(f"<u{size}")), LEVEL)
    return _HEAD.pack(size, len(firsts), len(frame)), frame


def _decode_integers(frame: bytes, size: int, firsts: int, number: int) -> Integers:
    begun = np.frombuffer(frame, "<i8", firsts)
    zigzag = _unshuffle(zlib.decompress(frame[8 * firsts :]), np.dtype(f"<u{size}"))
    zigzag = zigzag.astype(np.uint64)
    values: Integers = (zigzag >> np.uint64(1)).view(np.int64) ^ -(zigzag & np.uint64(1)).view(
        np.int64
    )
    for first in begun[::-1]:
        values = np.cumsum(np.concatenate([[first], values]))
    if len(values) != number:
        raise Damaged("it has too few steps")
    return values


def _shuffle(values: NDArray[np.generic]) -> bytes:
    size = values.dtype.itemsize
    return np.ascontiguousarray(values.view(np.uint8).reshape(len(values), size).T).tobytes()


def _unshuffle(content: bytes, kind: np.dtype[Any]) -> NDArray[Any]:
    rows = np.frombuffer(content, np.uint8).reshape(kind.itemsize, -1)
    return np.ascontiguousarray(rows.T).view(kind).ravel()
