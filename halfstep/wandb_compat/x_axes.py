"""Metrics that `define_metric` chooses as the x axes of others."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from halfstep.session.logged_values import is_number


class XAxes:
    """Metrics that are x axes, with their latest values."""

    def __init__(self) -> None:
        self.by_pattern: dict[str, str] = {}
        self._latest: dict[str, float] = {}

    def find(self, names: Iterable[str]) -> set[str]:
        """Return the x axes of metrics with these names."""
        return {
            metric
            for pattern, metric in self.by_pattern.items()
            if any(fnmatchcase(name, pattern) for name in names)
        }

    def record(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Return the latest values of the x axes of these metrics; W&B logs them too."""
        for metric in {*self.by_pattern.values()} & values.keys():
            if is_number(values[metric]):
                self._latest[metric] = values[metric]
        return {metric: self._latest[metric] for metric in self.find(values) & self._latest.keys()}
