"""Metrics for the x axis of a run's charts, as defined by W&B's `define_metric`."""

from collections.abc import Iterable
from typing import NamedTuple

from db.tables import Run

#: Setting of the configuration in which runs of earlier clients have {pattern: metric}.
SETTING = "step_metric"
MOST = 3


class StepMetric(NamedTuple):
    """A metric that a script has defined as an x axis."""

    name: str
    is_usual: bool  # the default axis of all metrics


def step_metrics(run: Run) -> list[StepMetric]:
    """Return the metrics that a script has defined as x axes, the first few."""
    defined = run.step_metrics or run.whole_config.get(SETTING)
    if not isinstance(defined, dict):
        return []
    names = dict.fromkeys(name for name in defined.values() if isinstance(name, str) and name)
    return [StepMetric(name, is_usual=name == defined.get("*")) for name in [*names][:MOST]]


def step_metrics_of(some_runs: Iterable[Run]) -> list[str]:
    """Return the names of the x axis metrics of several runs, the first few."""
    names = dict.fromkeys(axis.name for run in some_runs for axis in step_metrics(run))
    return [*names][:MOST]
