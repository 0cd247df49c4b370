"""Points of several metrics of a run, in shared arrays and as the bytes of a tail's row."""

import json
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from db.tables import clean
from db.telemetry import block_codec
from db.telemetry.block_codec import FLUSH, FLUSHES, Columns, Damaged
from db.telemetry.summaries import Ints, Points
from halfstep.telemetry.events import Metric

#: Columns of the points of one metric, and of several ones.
NAMES = ("step", "elapsed_ms", "value")
LAYOUT = ("owner", *NAMES)
#: A point of a flush that is not compressed.
RECORD = np.dtype([("owner", "<u4"), ("step", "<i8"), ("elapsed_ms", "<i8"), ("value", "<f8")])
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class MetricPoints:
    """Points of metrics in order of owner and step."""

    names: list[str]
    owner: Ints  # for each point, the index of its name in names
    points: Points

    @classmethod
    def of(cls, events: Iterable[Metric]) -> Self:
        """Convert spool events to points; the last event of a metric and step counts."""
        names: dict[str, int] = {}
        indexes: dict[str, int] = {}  # by original name, to clean each only once
        rows: list[tuple[int, int, int, float]] = []
        for event in events:
            if (index := indexes.get(event.name)) is None:
                index = names.setdefault(clean(event.name), len(names))
                indexes[event.name] = index
            rows.append((index, event.step, event.elapsed_ms, float(event.value)))
        columns = zip(*rows, strict=True) if rows else [()] * len(LAYOUT)
        kinds = (np.int64, np.int64, np.int64, np.float64)
        arrays = (np.array(column, kind) for column, kind in zip(columns, kinds, strict=True))
        return cls._in_order(list(names), dict(zip(LAYOUT, arrays, strict=True)))

    @classmethod
    def _in_order(cls, names: list[str], columns: Columns) -> Self:
        """Sort points; the last one of a metric and step counts."""
        order = np.lexsort((columns["step"], columns["owner"]))
        owner, step = columns["owner"][order], columns["step"][order]
        is_last = np.append((np.diff(owner) != 0) | (np.diff(step) != 0), np.ones(1, bool))
        order = order[is_last[: len(order)]]
        return cls(names, columns["owner"][order], points_of(block_codec.chosen(columns, order)))

    @classmethod
    def join(
        cls,
        parts: Iterable[bytes],
        only: Collection[str] | None = None,
        columns: Sequence[str] = NAMES,
    ) -> Self:
        """Return the points of the rows of a tail, the later of which count.

        only: the names of the points to return.  columns: of them. Raises Damaged.
        """
        names: dict[str, int] = {}
        values: list[NDArray[np.void] | Columns] = []
        owners: list[Ints] = []
        known, indexes = b"", np.empty(0, np.int64)
        for part in parts:
            packed, rows = _split(part, columns)
            if packed != known:  # mostly, the flushes of a run have the same names
                listed: list[str] = json.loads(zlib.decompress(packed))
                at = dict(zip(listed, range(len(listed)), strict=True))
                chosen = listed if only is None else [name for name in only if name in at]
                indexes = np.full(len(listed), -1)
                indexes[[at[name] for name in chosen]] = [
                    names.setdefault(name, len(names)) for name in chosen
                ]
                known = packed
            owner = indexes[rows["owner"]]
            if only is not None:
                is_chosen = owner >= 0
                owner = owner[is_chosen]
                rows = {name: rows[name][is_chosen] for name in columns}
            owners.append(owner)
            values.append(rows)
        if not owners:
            return cls.none()
        whole = {name: np.concatenate([rows[name] for rows in values]) for name in columns}
        if len(owners) == 1 and only is None:
            return cls(list(names), owners[0], points_of(whole))
        return cls._in_order(list(names), {"owner": np.concatenate(owners), **whole})

    @classmethod
    def none(cls) -> Self:
        """Return no points."""
        return cls([], np.empty(0, np.int64), no_points())

    def encode(self, *, is_compressed: bool) -> bytes:
        """Return the bytes of a tail's row."""
        packed = zlib.compress(json.dumps(self.names).encode())
        columns = {"owner": self.owner, **columns_of(self.points)}
        if is_compressed:
            kind, content = FLUSHES, block_codec.encode(columns, LAYOUT)
        else:
            records = np.empty(len(self.owner), RECORD)
            for name in LAYOUT:
                records[name] = columns[name]
            kind, content = FLUSH, records.tobytes()
        return block_codec.add_checksum(kind, _LENGTH.pack(len(packed)) + packed + content)

    @cached_property
    def first(self) -> Ints:
        """Index of the first point of each name."""
        return np.searchsorted(self.owner, np.arange(len(self.names)))

    @cached_property
    def last(self) -> Ints:
        """Index of the last point of each name."""
        return np.searchsorted(self.owner, np.arange(len(self.names)), side="right") - 1

    def chosen(self, which: NDArray[np.bool_]) -> Self:
        """Return some of the points."""
        indexes, owner = np.unique(self.owner[which], return_inverse=True)
        names = [self.names[index] for index in indexes.tolist()]
        return type(self)(names, owner, self.points[which])

    def by_name(self) -> Iterator[tuple[str, Points]]:
        """Yield the points of each name."""
        for index, name in enumerate(self.names):
            yield name, self.of_index(index)

    def of_index(self, index: int) -> Points:
        """Return the points of the name with an index."""
        return self.points[self.first[index] : self.last[index] + 1]


def _split(part: bytes, columns: Sequence[str]) -> tuple[bytes, Any]:
    """Return the compressed names, and owner and columns of a tail's row. Raises Damaged."""
    kind, content = block_codec.content_of(part)
    if kind not in (FLUSH, FLUSHES):
        raise Damaged(f"its format is {kind}; this version reads {FLUSH} and {FLUSHES}")
    [length] = _LENGTH.unpack_from(content)
    end = _LENGTH.size + length
    packed, rest = content[_LENGTH.size : end], content[end:]
    if kind == FLUSH:
        return packed, np.frombuffer(rest, RECORD)
    return packed, block_codec.decode(rest, ("owner", *columns), LAYOUT)


def columns_of(points: Points) -> Columns:
    """Return the columns of points of one metric."""
    return {"step": points.step, "elapsed_ms": points.elapsed_ms, "value": points.values[:, 0]}


def points_of(columns: Columns) -> Points:
    """Return the points with these columns; an absent one is 0."""
    step = columns["step"]
    zeros = np.broadcast_to(np.int64(0), step.shape)
    value = columns.get("value", zeros)
    return Points(step, columns.get("elapsed_ms", zeros), zeros, value[:, None])


def no_points() -> Points:
    """Return no points of a metric."""
    none = np.empty(0, np.int64)
    return Points(none, none, none, np.empty((0, 1)))


def encode(points: Points) -> bytes:
    """Return the bytes of a block of one metric."""
    return block_codec.encode(columns_of(points), NAMES)


def decode(data: bytes, names: Sequence[str] = NAMES) -> Points:
    """Return the points of a block of one metric. Raises Damaged."""
    return points_of(block_codec.decode(data, names, NAMES))
