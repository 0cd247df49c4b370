"""Series of a run as numpy arrays, or as Arrow or pandas tables if these are installed."""

import csv
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas
    import pyarrow


class Line(NamedTuple):
    """Steps (int64) and values (float64, also for integers such as elapsed_ms)."""

    step: NDArray[np.int64]
    value: NDArray[np.float64]


class Series(Mapping[str, Line]):
    """Lines by name; each has its own steps."""

    def __init__(
        self, lines: Mapping[str, Line], unknown: Mapping[str, NDArray[np.bool_]] | None = None
    ) -> None:
        """unknown: which NaN of a line are no values; by default none."""
        self._lines, self._unknown = dict(lines), unknown or {}

    def __getitem__(self, name: str) -> Line:
        return self._lines[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}: {len(line.step):,}" for name, line in self.items())
        return f"Series({inside})"

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return columns of equal length: `step`, and each line, with NaN where it has no value."""
        shared = [line.step for line in self.values()]
        steps = np.unique(np.concatenate(shared)) if shared else np.zeros(0, np.int64)
        columns: dict[str, NDArray[Any]] = {"step": steps}
        for name, line in self.items():
            columns[_column(name)] = np.full(len(steps), np.nan)
            columns[_column(name)][np.searchsorted(steps, line.step)] = line.value
        return columns

    def cells(self) -> dict[str, list[Any]]:
        """Return the columns as lists, with None where a line has no value or an unknown one."""
        columns = self.columns()
        cells: dict[str, list[Any]] = {"step": columns["step"].tolist()}
        for name, line in self.items():
            is_known = np.zeros(len(columns["step"]), bool)
            unknown = self._unknown.get(name, np.zeros(len(line.step), bool))
            is_known[np.searchsorted(columns["step"], line.step)] = ~unknown
            values = columns[_column(name)].astype(object)
            values[~is_known] = None
            cells[_column(name)] = values.tolist()
        return cells

    def arrow(self) -> "pyarrow.Table":
        """Return the columns as an Arrow table; requires pyarrow."""
        import pyarrow

        return pyarrow.table(self.columns())

    def pandas(self) -> "pandas.DataFrame":
        """Return the columns as a pandas DataFrame indexed by step; requires pandas."""
        import pandas

        return pandas.DataFrame(self.columns()).set_index("step")


def _column(name: str) -> str:
    """Return a line's column: a logged number may be named "step" too."""
    return name if name != "step" else "step (logged)"


def of_page(lines: Mapping[str, Mapping[str, Any]], shared: list[int]) -> Series:
    """Parse lines of a /series response, with NaN for unknown values, too.

    shared: steps of lines without their own.
    """
    read, unknown = {}, {}
    for name, line in lines.items():
        steps = shared if line["x"] is None else line["x"]
        values = [np.nan if value is None else float(value) for value in line["y"]]
        read[name] = Line(np.array(steps, np.int64), np.array(values, np.float64))
        unknown[name] = np.array([value is None for value in line["y"]], bool)
    return Series(read, unknown)


def of_steps(text: Iterable[str], first: int, last: float) -> Series:
    """Parse the export of all steps, unquoted CSV in pieces of any length."""
    names: list[str] = []
    tables: list[NDArray[np.float64]] = []
    empty: list[NDArray[np.bool_]] = []
    rest = ""
    for piece in text:
        whole, newline, rest = (rest + piece).rpartition("\n")
        if not newline:
            continue
        lines = whole.split("\n")
        if not names:
            names = lines.pop(0).split(",")
        if lines:
            cells = ",".join(lines).split(",")
            values = np.array([cell or "nan" for cell in cells], np.float64)
            values = values.reshape(-1, len(names))
            steps = values[:, names.index("step")]
            is_within = (steps >= first) & (steps <= last)
            tables.append(values[is_within])
            is_empty = np.array([not cell for cell in cells], bool)  # unknown
            empty.append(is_empty.reshape(-1, len(names))[is_within])
    table = np.concatenate(tables) if tables else np.zeros((0, len(names)))
    columns = dict(zip(names, table.T, strict=True))
    whole_steps = columns.pop("step").astype(np.int64)
    unknown = np.concatenate(empty) if empty else np.zeros((0, len(names)), bool)
    return Series(
        {name: Line(whole_steps, column.copy()) for name, column in columns.items()},
        dict(zip(names, unknown.T, strict=True)),
    )


def of_metrics(text: Iterable[str], first: int, last: float) -> Series:
    """Parse the export of all metrics, in pieces of any length."""
    logged: dict[str, tuple[array[int], array[float]]] = {}
    for row in csv.DictReader(lines_of(text)):
        if first <= int(row["step"]) <= last:
            steps, values = logged.setdefault(row["name"], (array("q"), array("d")))
            steps.append(int(row["step"]))
            values.append(float(row["value"]))
    return Series(
        {
            name: Line(np.array(steps, np.int64), np.array(values, np.float64))
            for name, (steps, values) in logged.items()
        }
    )


def lines_of(text: Iterable[str]) -> Iterator[str]:
    """Split text at newlines only: a name may contain other line separators of Python."""
    rest = ""
    for piece in text:
        *whole, rest = (rest + piece).split("\n")
        yield from (f"{line}\n" for line in whole)
    if rest:
        yield rest
