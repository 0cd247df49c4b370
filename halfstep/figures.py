"""Plotly figures for `watch.log`: those of a script, and the charts of `wandb.plot`.

    table = wandb.Table(columns=["class", "accuracy"], data=rows)
    watch.log({"val/accuracy": halfstep.plot.bar(table, "class", "accuracy")})

A table is one of W&B, a pandas DataFrame, or a list of dictionaries. Nonfinite values are gaps.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Points of a chart that are kept, evenly spaced.
MOST_POINTS = 10_000
MOST_LINES = 100
BINS = 64


@dataclass(frozen=True)
class Plot:
    """A plot, as the run's page draws it; `content` is JSON."""

    content: dict[str, Any]

    def encode(self) -> bytes:
        """Return the bytes of the plot's file."""
        return json.dumps(self.content, allow_nan=False).encode()


def of_plotly(figure: Any) -> Plot:
    """Return the plot of a figure of Plotly. Raises ValueError if it is none."""
    content = json.loads(figure.to_json())
    if not isinstance(content, dict) or not isinstance(content.get("data"), list):
        raise ValueError("a figure has no data; allowed: figures of Plotly")
    layout = content.get("layout") or {}
    layout.pop("template", None)  # the page has colors and fonts
    title = layout.pop("title", None)
    text = title.get("text") if isinstance(title, dict) else title
    return _plot(content["data"], layout, str(text or "Figure"))


def bar(table: object, label: str, value: str, title: str = "", split_table: bool = False) -> Plot:
    """Return a bar for each row of a table. label, value: names of its columns."""
    bars = {"type": "bar", "orientation": "h", "x": _column(table, value)}
    labels = [str(cell) for cell in _thin(_values(table, label))]
    layout = _axes(value, "") | {"yaxis": {"type": "category", "autorange": "reversed"}}
    return _plot([bars | {"y": labels}], layout, title or value)


def histogram(table: object, value: str, title: str = "", split_table: bool = False) -> Plot:
    """Return a histogram of a column."""
    given = (_number(cell) for cell in _values(table, value))
    values = np.array([number for number in given if number is not None], np.float64)
    counts, edges = np.histogram(values, BINS)
    middles = ((edges[:-1] + edges[1:]) / 2).tolist()
    bars = {"type": "bar", "x": middles, "y": counts.tolist()}
    return _plot([bars], _axes(value, "count") | {"bargap": 0.05}, title or value)


def scatter(table: object, x: str, y: str, title: str = "", split_table: bool = False) -> Plot:
    """Return a point for each row."""
    points = {"type": "scatter", "mode": "markers", "marker": {"size": 5}}
    points |= {"x": _column(table, x), "y": _column(table, y)}
    return _plot([points], _axes(x, y), title or f"{y} over {x}")


def line(
    table: object,
    x: str,
    y: str,
    stroke: str | None = None,
    title: str | None = None,
    split_table: bool = False,
) -> Plot:
    """Return a line over the rows, or one for each value of the column `stroke`."""
    rows = list(zip(_values(table, x), _values(table, y), strict=True))
    names = [""] * len(rows) if stroke is None else [str(cell) for cell in _values(table, stroke)]
    lines: dict[str, list[tuple[object, object]]] = {}
    for name, row in zip(names, rows, strict=True):
        lines.setdefault(name, []).append(row)
    traces = [_line(name, *zip(*points, strict=True)) for name, points in lines.items()]
    return _plot(_check_count(traces), _axes(x, y), title or f"{y} over {x}")


def line_series(
    xs: Any,
    ys: Sequence[Any],
    keys: Sequence[str] | None = None,
    title: str = "",
    xname: str = "x",
    split_table: bool = False,
) -> Plot:
    """Return several lines. xs: one list for all lines, or one for each."""
    ys = [list(y) for y in ys]
    shares_xs = not (len(xs) and hasattr(xs[0], "__len__"))
    all_xs = [list(xs)] * len(ys) if shares_xs else [list(x) for x in xs]
    names = [str(number) for number in range(len(ys))] if keys is None else list(map(str, keys))
    if not len(all_xs) == len(ys) == len(names):
        given = f"{len(all_xs)} xs, {len(ys)} ys and {len(names)} keys"
        raise ValueError(f"line_series has {given}; allowed: as many of each")
    traces = [_line(*parts) for parts in zip(names, all_xs, ys, strict=True)]
    return _plot(_check_count(traces), _axes(xname, ""), title or "Lines")


def points(given: object, title: str = "") -> Plot:
    """Return a cloud of points in space. given: x, y, z, and a category or the colors r, g, b."""
    given = given.detach().cpu() if hasattr(given, "detach") else given
    rows = np.asarray(given, np.float64)
    if rows.ndim != 2 or rows.shape[1] not in (3, 4, 6):
        shapes = "(N, 3), (N, 4) with categories, (N, 6) with colors"
        raise ValueError(f"points have shape {rows.shape}; allowed: {shapes}")
    rows = rows[np.isfinite(rows).all(axis=1)]
    rows = rows[_spread(len(rows))]
    marker: dict[str, object] = {"size": 2}
    if rows.shape[1] == 4:
        marker["color"] = rows[:, 3].tolist()
    elif rows.shape[1] == 6:
        marker["color"] = [f"rgb({r},{g},{b})" for r, g, b in rows[:, 3:].round().astype(int)]
    x, y, z = rows[:, :3].T.tolist()
    trace = {"type": "scatter3d", "mode": "markers", "marker": marker, "x": x, "y": y, "z": z}
    return _plot([trace], {"scene": {"aspectmode": "data"}}, title or "Points")


def _line(name: str, xs: Sequence[object], ys: Sequence[object]) -> dict[str, Any]:
    trace = {"type": "scatter", "mode": "lines", "name": name}
    return trace | {"x": _numbers(xs), "y": _numbers(ys)}


def _check_count(traces: list[dict[str, object]]) -> list[dict[str, Any]]:
    if len(traces) > MOST_LINES:
        raise ValueError(f"it has {len(traces)} lines; allowed: at most {MOST_LINES}")
    return traces


def _axes(x: str, y: str) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}


def _plot(data: Sequence[object], layout: dict[str, object], title: str) -> Plot:
    return Plot({"plot": "figure", "title": title, "data": data, "layout": layout})


def _column(table: object, name: str) -> list[Any]:
    return _numbers(_values(table, name))


def _values(table: Any, name: str) -> list[object]:
    """Return a column. Raises ValueError if the table has none of this name."""
    try:
        if hasattr(table, "get_column"):
            return list(table.get_column(name))
        if isinstance(table, list):
            return [row[name] for row in table]
        return list(table[name])
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"the table has no column {name!r}; allowed: its columns") from error


def _thin(values: Sequence[object]) -> list[object]:
    return [values[at] for at in _spread(len(values))]


def _spread(count: int) -> NDArray[np.int64]:
    """Return the indexes of the points that are kept of so many."""
    return np.linspace(0, count - 1, min(count, MOST_POINTS)).round().astype(np.int64)


def _numbers(values: Sequence[object]) -> list[object]:
    """Return values for an axis: numbers, and texts as they are."""
    return [_number(value) for value in _thin(values)]


def _number(value: Any) -> Any:
    if isinstance(value, str):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
