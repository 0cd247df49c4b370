"""The x axes that a script defines."""

from typing import Any

from app.telemetry.step_metrics import MOST, step_metrics
from db.tables import Run
from tests.marks import looped


@looped(
    "defined, names",
    [
        ({"val/*": "epoch", "train/*": "samples", "test/*": "epoch"}, ["epoch", "samples"]),
        ({f"{n}": f"metric {n}" for n in range(9)}, [f"metric {n}" for n in range(MOST)]),
        ({"a": "", "b": 5, "c": None, "d": ["epoch"], "e": "epoch"}, ["epoch"]),
        ("epoch", []),
        (["epoch"], []),
        (None, []),
    ],
)
def test_axes_are_the_metrics_that_are_named(defined: Any, names: list[str]) -> None:
    """The first few named metrics are axes, each once; older clients sent them differently."""
    assert [metric.name for metric in step_metrics(Run(config={"step_metric": defined}))] == names
    assert step_metrics(Run(config={})) == []


def test_the_axis_of_all_metrics_is_usual() -> None:
    """The axis of all metrics is the usual one, and some metrics may have another."""
    found = step_metrics(Run(config={}, step_metrics={"val/*": "epoch", "*": "samples"}))
    assert found == [("epoch", False), ("samples", True)]
