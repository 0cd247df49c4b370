"""A run as a Plotly figure, from a real server's chart."""

import pytest

from db.database import Database
from db.tables import Run
from halfstep import ApiError, Client
from tests.db.telemetry.telemetry_made import make_events, make_metric, make_steps, record


@pytest.fixture
def trained(database: Database, running: Run) -> int:
    """A run of 40 steps, of which two were skipped, with a metric."""
    steps = make_steps([1.0 / (1 + n) for n in range(40)], skipped=[3, 4])
    events = [*make_events([3, 4]), make_metric(20, 0.5, "val/accuracy")]
    record(database, running, steps, events=events)
    return running.id


def test_a_run_is_plotted_with_its_scale_and_skips(client: Client, trained: int) -> None:
    """A run's default figure has loss over loss scale, with a mark at each skip."""
    figure = client.run(trained).plot()  # type: ignore[attr-defined]
    assert [trace.name for trace in figure.data] == ["loss", "scale"]
    assert len(figure.data[0].x) == 40
    assert {shape.x0 for shape in figure.layout.shapes} == {3, 4}


def test_names_choose_the_panels(client: Client, trained: int) -> None:
    """A figure's panels can be chosen by name; an unknown name gets the list."""
    figure = client.plot(trained, "val/accuracy", "grad_norm")
    assert [trace.name for trace in figure.data] == ["val/accuracy", "grad_norm"]
    assert list(figure.data[0].y) == [0.5]
    with pytest.raises(ApiError, match=r"no series 'val/loss'; allowed: .*loss"):
        client.plot(trained, "val/loss")
