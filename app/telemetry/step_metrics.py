"""The metrics that the x axis of a run's charts can count, as W&B's `define_metric` names them."""

from typing import Any, NamedTuple

#: A setting of the configuration, in which halfstep.wandb_compat keeps {pattern: metric}.
SETTING = "step_metric"
MOST = 3


class StepMetric(NamedTuple):
    """is_usual: whether it is the axis of all metrics."""

    name: str
    is_usual: bool


def step_metrics(config: dict[str, Any]) -> list[StepMetric]:
    """Return the metrics that a script has defined as x axes, the first few."""
    defined = config.get(SETTING)
    if not isinstance(defined, dict):
        return []
    names = dict.fromkeys(name for name in defined.values() if isinstance(name, str) and name)
    return [StepMetric(name, is_usual=name == defined.get("*")) for name in [*names][:MOST]]


def step_metrics_of(configs: list[dict[str, Any]]) -> list[str]:
    """Return the names of those of any of several runs, the first few."""
    names = dict.fromkeys(each.name for config in configs for each in step_metrics(config))
    return [*names][:MOST]
