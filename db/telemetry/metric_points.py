"""Points of several metrics of a run, stored in shared arrays."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from db.tables import clean
from db.telemetry.summaries import Ints, Points
from halfstep.telemetry.events import Metric


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
        rows: dict[tuple[int, int], tuple[int, float]] = {}
        for event in events:
            if (index := indexes.get(event.name)) is None:
                index = names.setdefault(clean(event.name), len(names))
                indexes[event.name] = index
            rows[index, event.step] = event.elapsed_ms, float(event.value)
        keys = np.array(list(rows), np.int64).reshape(-1, 2)
        elapsed_ms, values = zip(*rows.values(), strict=True) if rows else ((), ())
        order = np.lexsort((keys[:, 1], keys[:, 0]))
        points = Points(
            step=keys[:, 1],
            elapsed_ms=np.array(elapsed_ms, np.int64),
            flags=np.zeros(len(keys), np.int64),
            values=np.array(values, np.float64)[:, None],
        )
        return cls(list(names), keys[order, 0], points[order])

    @cached_property
    def first(self) -> Ints:
        """Index of the first point of each name."""
        return np.searchsorted(self.owner, np.arange(len(self.names)))

    @cached_property
    def last(self) -> Ints:
        """Index of the last point of each name."""
        return np.append(self.first[1:], len(self.owner)) - 1

    def of_names(self, indexes: Ints) -> Self:
        """Return the points of the names at these indices, given in ascending order."""
        mine = np.isin(self.owner, indexes)
        names = [self.names[index] for index in indexes.tolist()]
        return type(self)(names, np.searchsorted(indexes, self.owner[mine]), self.points[mine])
