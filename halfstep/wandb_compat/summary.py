"""`wandb.summary`: the latest value of each metric, or those that `define_metric` selects."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

from halfstep.session.logged_values import as_scalar, is_number
from halfstep.telemetry.plain_json import JsonObject
from halfstep.wandb_compat.log_values import to_cell
from halfstep.wandb_compat.settings import Entries

SUMMARIES: Mapping[str, Callable[[float, float], float]] = {"min": min, "max": max}


class Summary:
    """Entries of a run's summary, which the script may set, too."""

    def __init__(self) -> None:
        self.entries = Entries(self._note_change)
        self._kinds: dict[str, tuple[str, str]] = {}  # each: pattern and kind
        self._own: set[str] = set()  # entries that the script set itself
        self._is_recording = False

    def define(self, pattern: str, kinds: str, goal: str | None) -> None:
        """Select values of metrics. kinds: min, max, mean, best, last or none, with commas."""
        for kind in filter(None, kinds.split(",")):
            self._kinds[f"{kind} {pattern}"] = (pattern, _resolve_best(kind, goal))

    def record(self, values: Mapping[str, Any]) -> None:
        """Store logged values, or what is selected of them."""
        self._is_recording = True
        for name, value in values.items():
            with suppress(OverflowError):  # no float can hold it; `Watch.log` has said so
                self._record_value(name, value)
        self._is_recording = False

    def read_numbers(self) -> JsonObject:
        """Return the numbers that the script set or selected, by the names of their metrics."""
        set_names = [name for name in self.entries if name in self._own]
        own = {f"summary/{name}": self.entries[name] for name in set_names}
        for name, entry in self.entries.items():
            if isinstance(entry, dict):  # of `define_metric`
                chosen = {kind: value for kind, value in entry.items() if kind != "count"}
                own |= {f"summary/{name}.{kind}": value for kind, value in chosen.items()}
        return {name: value for name, value in own.items() if is_number(value)}

    def list_rows(self) -> list[JsonObject]:
        """Return the entries as rows of a table."""
        return [{"name": name, "value": to_cell(value)} for name, value in self.entries.items()]

    def _record_value(self, name: str, value: Any) -> None:
        if not (is_number(value) or isinstance(value, str)) or getattr(value, "is_cuda", False):
            return  # do not wait for the device
        value = value.detach() if hasattr(value, "detach") else value
        value = value if isinstance(value, str | bool) else float(as_scalar(value))
        kinds = [kind for pattern, kind in self._kinds.values() if fnmatchcase(name, pattern)]
        if not kinds or isinstance(value, str):
            self.entries[name] = value
            return
        entry = self.entries.get(name)
        entry = dict(entry) if isinstance(entry, dict) else {}
        for kind in kinds:
            if kind == "mean":
                count = entry.get("count", 0) + 1
                entry |= {"mean": entry.get("mean", 0.0) * (1 - 1 / count) + value / count}
                entry["count"] = count
            elif kind == "last":
                entry["last"] = value
            elif kind in SUMMARIES:
                entry[kind] = SUMMARIES[kind](entry.get(kind, value), value)
        if entry:
            self.entries[name] = entry

    def _note_change(self, changed: JsonObject) -> None:
        if not self._is_recording:
            self._own |= changed.keys()


def _resolve_best(kind: str, goal: str | None) -> str:
    if kind == "best":
        return "max" if goal and goal.startswith("max") else "min"
    return kind
