"""Metrics for the x axis of a run's charts, as defined by W&B's `define_metric`."""

from typing import Any, NamedTuple

from halfstep.telemetry.plain_json import JsonObject

#: Configuration setting in which halfstep.wandb_compat stores {pattern: metric}.
SETTING = "step_metric"
MOST = 3


class StepMetric(NamedTuple):
    """A metric that a script has defined as an x axis."""

    name: str
    is_usual: bool  # the default axis of all metrics


def step_metrics(config: JsonObject) -> list[StepMetric]:
    """Return the metrics that a script has defined as x axes, the first few."""
    defined = config.get(SETTING)
    if not isinstance(defined, dict):
        return []
    names = dict.fromkeys(name for name in defined.values() if isinstance(name, str) and name)
    return [StepMetric(name, is_usual=name == defined.get("*")) for name in [*names][:MOST]]


def step_metrics_of(configs: list[dict[str, Any]]) -> list[str]:
    """Return the names of the x axis metrics of several runs, the first few."""
    names = dict.fromkeys(axis.name for config in configs for axis in step_metrics(config))
    return [*names][:MOST]
