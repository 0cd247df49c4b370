"""The direction in which a metric is better."""

import math

from app.telemetry import metric_direction
from tests.marks import looped


@looped(
    "name, is_lowest",
    [
        ("val/accuracy", False),
        ("val/Top-1", False),
        ("eval_loss", True),
        ("val/error_rate", True),
        ("accuracy_loss", None),
        ("val/score", None),
        ("glossary", None),
    ],
)
def test_names_say_it(name: str, is_lowest: bool | None) -> None:
    """A whole word of a metric's name decides its direction; contrary words leave it unknown."""
    assert metric_direction.lowest(name, [{}]) is is_lowest


def test_best_checkpoint_decides_the_direction() -> None:
    """The metric of a run's best checkpoint overrides its name, unless runs disagree."""
    low = {"checkpoints": {"keep_best": "val/accuracy", "best_is": "lowest"}}
    high = {"checkpoints": {"keep_best": "val/accuracy"}}
    assert metric_direction.lowest("val/accuracy", [low, {}]) is True
    assert metric_direction.lowest("val/accuracy", [low, high]) is None
    assert metric_direction.lowest("val/score", [{"checkpoints": "hourly"}]) is None


def test_best_is_of_finite_values_that_differ() -> None:
    """Equal best values are all marked as best; a single value or all-equal values have no best."""
    assert metric_direction.best([2.0, math.nan, 1.0, None, 1.0], is_lowest=True) == {2, 4}
    assert metric_direction.best([2.0, math.inf, 1.0], is_lowest=False) == {0}
    assert metric_direction.best([1.0, None], is_lowest=True) == frozenset()
    assert metric_direction.best([1.0, 1.0], is_lowest=True) == frozenset()
