"""Plotly figures and W&B charts, as contents of a plot."""

import json
import math
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from halfstep import figures, plot
from halfstep.figures import Plot
from halfstep.session.logged_values import Html, Video, as_file
from halfstep.wandb_compat.media import Table

ROWS = [
    {"name": "a", "x": 1, "y": 0.5},
    {"name": "b", "x": 2, "y": math.nan},
    {"name": "a", "x": 3, "y": 1.5},
]
TABLES = [ROWS, Table(columns=["name", "x", "y"], data=[list(row.values()) for row in ROWS])]


def content(made: Plot) -> dict[str, Any]:
    """Return a plot's content as the page reads it."""
    found: dict[str, Any] = json.loads(made.encode())
    assert found["plot"] == "figure"
    return found


@pytest.mark.parametrize("table", TABLES, ids=["rows", "table"])
def test_charts_of_a_table(table: Any) -> None:
    """W&B's chart functions accept its arguments; non-finite values become gaps."""
    [bars] = content(plot.bar(table, "name", "x", title="Bars"))["data"]
    assert (bars["y"], bars["x"], bars["orientation"]) == (["a", "b", "a"], [1, 2, 3], "h")
    [points] = content(plot.scatter(table, "x", "y"))["data"]
    assert (points["x"], points["y"]) == ([1, 2, 3], [0.5, None, 1.5])
    lines = content(plot.line(table, "x", "y", stroke="name"))["data"]
    assert [(line["name"], line["x"]) for line in lines] == [("a", [1, 3]), ("b", [2])]
    [counts] = content(plot.histogram(table, "y"))["data"]
    assert sum(counts["y"]) == 2


def test_several_lines_share_their_xs_or_have_their_own() -> None:
    """Several lines need as many names, and values of equal length."""
    shared = content(plot.line_series([0, 1], [[1, 2], [3, 4]], keys=["a", "b"], xname="step"))
    assert [line["x"] for line in shared["data"]] == [[0, 1], [0, 1]]
    assert shared["layout"]["xaxis"]["title"]["text"] == "step"
    own = content(plot.line_series([[0], [1, 2]], [[1], [3, 4]]))
    assert [(line["name"], line["x"]) for line in own["data"]] == [("0", [0]), ("1", [1, 2])]
    with pytest.raises(ValueError, match="1 xs, 2 ys and 2 keys; allowed: as many of each"):
        plot.line_series([[0]], [[1], [2]])


def test_a_long_chart_is_thinned() -> None:
    """A long chart is thinned, and keeps its first and last points."""
    rows = [{"x": number, "y": number} for number in range(25_000)]
    [points] = content(plot.scatter(rows, "x", "y"))["data"]
    assert len(points["x"]) == figures.MOST_POINTS
    assert (points["x"][0], points["x"][-1]) == (0, 24_999)


def test_a_missing_column_is_named() -> None:
    """A missing column is an error with its name, and not a KeyError."""
    with pytest.raises(ValueError, match="no column 'z'"):
        plot.bar(ROWS, "name", "z")


def test_a_figure_of_plotly_keeps_data_and_layout() -> None:
    """A Plotly figure keeps data and layout but not its template, since the page has its own."""
    figure = go.Figure(go.Scatter(x=np.arange(3), y=[1.0, math.nan, 3.0]), {"title": "Loss"})
    suffix, encoded = as_file(figure)
    assert suffix == "plot.json"
    found = json.loads(encoded)
    assert (found["plot"], found["title"]) == ("figure", "Loss")
    assert "template" not in found["layout"]
    assert found["data"][0]["type"] == "scatter"


def test_points_have_categories_or_colors() -> None:
    """Points can have categories or colours; non-finite rows are left out."""
    cloud = figures.points([[0, 0, 0, 1], [1, math.nan, 1, 2], [1, 2, 3, 4]], "Scan").content
    assert (cloud["title"], cloud["data"][0]["marker"]["color"]) == ("Scan", [1.0, 4.0])
    assert [cloud["data"][0][axis] for axis in "xyz"] == [[0, 1], [0, 2], [0, 3]]
    colored = figures.points(np.array([[0, 0, 0, 255, 0, 10]])).content
    assert colored["data"][0]["marker"]["color"] == ["rgb(255,0,10)"]
    with pytest.raises(ValueError, match=r"shape \(2, 2\); allowed: \(N, 3\)"):
        figures.points(np.zeros((2, 2)))


def test_videos_and_documents_are_files(tmp_path: Any) -> None:
    """Video frames become a GIF; a file of another kind is refused."""
    suffix, encoded = as_file(Video(np.zeros((3, 3, 8, 8), np.uint8), 10))
    assert (suffix, encoded[:4]) == ("gif", b"GIF8")
    path = tmp_path / "a.mp4"
    path.write_bytes(b"mp4")
    assert as_file(Video(path)) == ("mp4", b"mp4")
    with pytest.raises(ValueError, match=r"file \.avi; allowed: mp4"):
        as_file(Video("a.avi"))
    with pytest.raises(ValueError, match="in float64; allowed: "):
        as_file(Video(np.zeros((3, 3, 8, 8))))
    assert as_file(Html("<p>here</p>")) == ("html", b"<p>here</p>")
