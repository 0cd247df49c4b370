"""The first charts of a run's page, as the server draws them."""

import re
from itertools import pairwise

import pytest
from starlette.testclient import TestClient

from app.runs.static_charts import _log_ticks
from db.database import Database
from db.tables import Run, User
from tests.app.conftest import CONFIG, start_run
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record
from tests.marks import looped

STEPS = 4000
SKIPS = [5, 1000, 3999]


def _chart(page: str, row: str) -> str:
    return page.partition(f'data-row="{row}"')[2].partition("</section>")[0]


def _points(path: str) -> list[tuple[int, int]]:
    """Return the vertices of a polyline."""
    return [(int(x), int(y)) for x, y in re.findall(r"[ML](\d+) (-?\d+)", path)]


def test_page_has_the_charts_of_the_run(
    database: Database, running: Run, browser: TestClient
) -> None:
    """The response has SVG charts of losses and scale, with skips and last values."""
    losses = [2.0 - 1.5 * (step + 1) / STEPS for step in range(STEPS)]
    losses[2345] = 4.0
    record(
        database,
        running,
        make_steps(losses, skipped=SKIPS),
        events=[make_metric(step, 1.0, "val/loss") for step in (1000, STEPS)],
    )
    page = browser.get("/runs/1").text
    loss, scale = _chart(page, "loss"), _chart(page, "scale")
    assert f'data-last="loss">{losses[-1]:.5g}<' in loss
    assert 'data-last="val/loss">1<' in loss
    assert 'data-last="scale">2<sup>17</sup><' in scale
    drawn, measured = re.findall(r'<path d="([^"]+)" style', loss)
    points = _points(drawn)
    assert points[-1] == (1000, round(1000 - 950 * losses[-1] / 4))  # 5 % free above the highest
    assert (586, 50) in points  # the one spike of 4,000 steps
    assert all(a[0] <= b[0] for a, b in pairwise(points))
    assert len(points) <= 4 * 1001
    assert [x for x, _ in _points(measured)] == [250, 1000]
    for chart in (loss, scale):
        assert 'd="M1 0V9M250 0V9M1000 0V9"' in chart
        assert ">2,000</span>" in chart
    assert "<sup>18</sup></span>" in scale
    assert re.search(r'class="stepped" d="M0 \d+H', scale)


@pytest.mark.parametrize("first", [0, 1])
def test_loss_that_is_logged_again_is_drawn_once(
    first: int, database: Database, running: Run, browser: TestClient
) -> None:
    """A loss that a script also logs, with steps counted from 0 or 1, is drawn once."""
    losses = [3.0, 2.0, 1.0]
    logged = [make_metric(step, loss, "train/loss") for step, loss in enumerate(losses, first)]
    record(database, running, make_steps(losses), events=logged)
    loss = _chart(browser.get("/runs/1").text, "loss")
    assert 'data-last="loss"' in loss
    assert 'data-last="train/loss"' not in loss


def test_each_logged_loss_has_a_color_of_its_own(
    database: Database, running: Run, browser: TestClient
) -> None:
    """A training loss that evaluations log is drawn in another colour than the validation loss."""
    names = ["val/loss", "train/loss", "test/loss"]
    logged = [make_metric(3, 5.0, name) for name in names]
    record(database, running, make_steps([3.0, 2.0, 1.0]), events=logged)
    loss = _chart(browser.get("/runs/1").text, "loss")
    colors = re.findall(r"stroke:var\((--[\w-]+)\)", loss)
    assert colors == ["--chart-loss", "--chart-val", "--run-1", "--run-2"]


def test_charts_of_another_view_are_left_to_the_scripts(
    database: Database, running: Run, browser: TestClient
) -> None:
    """The server draws charts by step only; zoomed views and other axes are left to the scripts."""
    record(database, running, make_steps([1.0] * 10))
    assert "data-static-chart" in browser.get("/runs/1?tab=charts").text
    for query in ("x=time", "range=1,5", "y.loss=0,1", "smooth=0.5", "ylog=lr"):
        assert "data-static-chart" not in browser.get(f"/runs/1?{query}").text


@pytest.mark.parametrize(
    "losses",
    [[1.0], [float("nan")] * 3, [0.0, 0.0], [-1.0, float("inf"), -2.0], [1e-30, 1e30]],
)
def test_any_loss_can_be_drawn(
    losses: list[float], database: Database, running: Run, browser: TestClient
) -> None:
    """A chart is drawn for a single step and for non-finite, equal, negative and extreme losses."""
    record(database, running, make_steps(losses, skipped=[1]))
    page = browser.get("/runs/1")
    assert page.status_code == 200
    assert "data-static-chart" in _chart(page.text, "loss")
    drawn = _chart(page.text, "loss").partition("data-static-chart")[2]
    assert not re.search("nan|inf", drawn.partition("</div>")[0].lower())


def test_page_without_steps_has_no_chart_yet(running: Run, browser: TestClient) -> None:
    """A run without steps has empty chart panels."""
    assert '<svg class="lines"' not in browser.get("/runs/1").text


def test_run_without_scaler_has_its_gradient_norm(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """A run with its scaler disabled shows its loss and gradient norm."""
    run = start_run(database, ada, config=CONFIG | {"scaler": {"enabled": False}})
    steps = make_steps([1.0] * 10)
    steps["scale"] = 1
    record(database, run, steps)
    page = browser.get("/runs/1").text
    assert 'data-last="norm">1<' in _chart(page, "norm")
    assert 'data-row="scale"' not in page


@looped(
    "low, high, ticks",
    [
        (0.08, 1, [0.1, 0.2, 0.5, 1]),
        (1e-3, 1, [1e-3, 1e-2, 0.1, 1]),
        (1e-12, 1, [1e-12, 1e-9, 1e-6, 1e-3, 1]),
        (0.69, 0.71, [0.69, 0.695, 0.7, 0.705, 0.71]),
    ],
)
def test_a_logarithmic_axis_has_at_least_three_labels(
    low: float, high: float, ticks: list[float]
) -> None:
    """A logarithmic axis has at least three labels: powers of ten, their multiples by 2 and 5, or
    those of a linear axis.
    """
    assert _log_ticks(low, high) == pytest.approx(ticks)


def test_values_that_are_not_finite_are_marked(
    database: Database, running: Run, browser: TestClient
) -> None:
    """Values that are not finite are marked at the chart's edges, with their signs in the legend; a
    last loss of NaN is shown as NaN.
    """
    nan, inf = float("nan"), float("inf")
    events = [make_metric(1, -inf, "val/loss"), make_metric(4, 1.0, "val/loss")]
    record(database, running, make_steps([1.0, inf, 1.0, 1.0, nan]), events=events)
    chart = _chart(browser.get("/runs/1").text, "loss")
    assert re.findall(r"left:(\d+)%;(top|bottom):[^>]*>(.)</span>", chart) == [
        ("100", "bottom", "✕"),
        ("25", "top", "▲"),
        ("0", "bottom", "▼"),
    ]
    assert re.findall(r'class="sign" title="(.*?)"', chart) == ["NaN", "∞", "−∞"]
    assert 'data-last="loss">NaN<' in chart


def test_buckets_with_values_that_are_not_finite_are_marked(
    database: Database, running: Run, browser: TestClient
) -> None:
    """Non-finite values get at most one mark for each hundredth of the axis."""
    losses = [1.0] * (STEPS // 2) + [float("nan")] * (STEPS // 2)
    record(database, running, make_steps(losses))
    chart = _chart(browser.get("/runs/1").text, "loss")
    assert 30 <= chart.count(">□</span>") <= 51
    assert 'class="sign" title="not finite"' in chart
