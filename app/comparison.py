"""The same run in several precisions: queue them, and lay them side by side, as ratios to fp32.

A run and its fork with a module in fp32 are laid side by side as well, as ratios to the run.
"""

import math
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from app import schemas
from app.submission import LENGTHS, Submission, submit
from app.summary import RunSummary, summarise_all
from db import groups, runs, verdict, windows, workers
from db.groups import TF32
from db.settings import Settings
from db.tables import ENDED, Run, User

#: What is measured of every recipe; the recipe's own metrics follow.
MEASURED = {"run/seconds": "Time", "run/peak_memory_bytes": "Peak memory"}
#: Of the last steps: runs of unlike length, a run and its fork say, are compared by it.
STEP = "run/step_ms"
LABELS = {STEP: "Time a step", **MEASURED}


@dataclass(frozen=True)
class Figure:
    """A number of one run; ratio: to the reference's, where both are there and finite."""

    value: float | None
    ratio: float | None


@dataclass(frozen=True)
class Column:
    """One run of a comparison. device: empty until it has trained.  figures: by name of the
    metric, or loss.
    """

    label: str
    run: RunSummary
    device: str
    figures: dict[str, Figure]


@dataclass(frozen=True)
class Comparison:
    """names: of the figures, in order; differences: fields of which runs have unequal values.

    reference: the label of the run that ratios are to: fp32's, or the first of runs of one
    precision.  left_out: precisions that no worker offered when such a comparison was queued.
    is_on_cpu: some run trains on a CPU, or all will.
    """

    columns: list[Column]
    reference: str
    names: list[str]
    differences: list[tuple[str, list[Any]]]
    left_out: list[str]
    is_on_cpu: bool
    is_of_precisions: bool

    @property
    def has_devices_that_differ(self) -> bool:
        """Whether times say as much of devices as of precisions."""
        return len({column.device for column in self.columns} - {""}) > 1


def queue(session: Session, user: User, source: Run) -> list[Run]:
    """Queue a run's configuration and seed in each precision; the first is named by their group.

    A precision that no worker offers is left out: it would wait for ever. With no worker up, all
    are queued. TF32 is there if all devices that may train it have it: others would train in fp32
    under its name.  Raises Invalid if the recipe no longer takes this configuration, Conflict if
    the run has no recipe.
    """
    runs.check_has_recipe(source, "be compared with others of its configuration")
    has_own_name = source.name != f"{source.recipe}-{source.precision}"
    base = source.name if has_own_name else source.recipe
    offered = workers.precisions_for(session, source.recipe)
    has_tf32 = workers.has_tf32(session, source.recipe)
    queued = []
    for label, changes in groups.VARIANTS.items():
        if (offered and changes["precision"] not in offered) or (label == TF32 and not has_tf32):
            continue
        config = deepcopy(source.config)
        for path, value in changes.items():
            schemas.put(config, path, value)
        ending = f" {label}"
        submission = Submission(
            recipe=source.recipe,
            config=config,
            name=base[: LENGTHS["name"] - len(ending)] + ending,
            tags=source.tags,
            priority=source.priority,
            devices_per_node=source.devices_per_node,
            parent_id=source.parent_id,
            parent_step=source.parent_step,
        )
        queued.append(submit(session, user, submission))
    for run in queued:
        run.group_id = queued[0].id
    return queued


def lay_out(session: Session, group_id: int, settings: Settings) -> Comparison:
    """Lay a group side by side. Raises NotFound."""
    members = groups.members(session, group_id)
    measured = {run.id: _measured(session, run) for run, _owner in members}
    configs = [run.config for run, _owner in members]
    variants = [groups.variant(config) for config in configs]
    is_of_precisions = len(set(variants)) > 1
    first = variants.index("fp32") if "fp32" in variants else 0
    has_reference = variants[first] == "fp32" or not is_of_precisions
    base = measured[members[first][0].id] if has_reference else {}
    own = dict.fromkeys(name for figures in measured.values() for name in figures)
    names = [*LABELS, "loss", *(name for name in own if name not in (*LABELS, "loss"))]
    devices = groups.devices(session, group_id)
    columns = [
        Column(
            label,
            summary,
            devices.get(summary.id, ""),
            {name: _figure(name, measured[summary.id], base) for name in names},
        )
        for label, summary in zip(
            groups.labels(configs), summarise_all(session, members, settings), strict=True
        )
    ]
    shown = {*variants, TF32}  # which is no precision to ask for, but a setting of fp32
    return Comparison(
        columns,
        variants[first],
        names,
        _differences(configs),
        [label for label in groups.VARIANTS if label not in shown] if is_of_precisions else [],
        groups.is_on_cpu(session, group_id),
        is_of_precisions,
    )


def _measured(session: Session, run: Run) -> dict[str, float | None]:
    """Return the latest of each metric and of the loss; time and memory only of whole runs."""
    metrics = {each.name: each.value for each in windows.measured(session, run.id)}
    if run.step:
        metrics["loss"] = math.nan if run.loss is None else run.loss
    if run.steps_per_second:
        metrics[STEP] = 1000 / run.steps_per_second
    if run.status not in ENDED:
        metrics = {name: metrics[name] for name in metrics if name not in MEASURED}
    return {name: math.nan if value is None else value for name, value in metrics.items()}


def _figure(name: str, mine: dict[str, float | None], base: dict[str, float | None]) -> Figure:
    value, reference = mine.get(name), base.get(name)
    if value is None or not reference or not math.isfinite(value / reference):
        return Figure(value, None)
    return Figure(value, value / reference)


def _differences(configs: list[dict[str, Any]]) -> list[tuple[str, list[Any]]]:
    flat = [dict(schemas.flat(config)) for config in configs]
    for config, each in zip(configs, flat, strict=True):
        if "scaler.enabled" in each:  # what a precision without a scale is told is not so
            each["scaler.enabled"] = verdict.is_scaled(config)
    paths = dict.fromkeys(path for each in flat for path in each)
    rows = [(path, [each.get(path) for each in flat]) for path in paths]
    return [(path, values) for path, values in rows if len(set(map(repr, values))) > 1]
