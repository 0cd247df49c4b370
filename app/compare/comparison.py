"""Comparisons of runs: any runs, or a group with ratios to one of them.

A group is one configuration in several precisions, queued here, with ratios to fp32; or a run and
its forks with a module in fp32, with ratios to the run.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy.orm import Session

from app.compare import run_colors
from app.html import formats
from app.runs.summary import RunSummary, summarise_all
from app.submission import config_schema
from app.submission.submission import LENGTHS, Submission, most_priority, submit
from app.telemetry import metric_direction
from app.telemetry.step_metrics import step_metrics_of
from db.errors import NotFound
from db.health import verdict
from db.queue import workers
from db.runs import comparisons, groups, runs
from db.runs.groups import FP8, TF32
from db.settings import Settings
from db.tables import ENDED, RECIPE, Run, User
from db.telemetry import windows

#: What is measured of every recipe; the recipe's own metrics follow.
MEASURED = {"run/seconds": "Time", "run/peak_memory_bytes": "Peak memory"}
#: Of the last steps: runs of unlike length, a run and its fork say, are compared by it.
STEP = "run/step_ms"
LABELS = {STEP: "Time a step", **MEASURED, "seconds": "Duration", "loss": "Last loss"}
#: Best where they are low, but of whole runs of one length only.
OF_LENGTH = ("run/seconds", "seconds")
#: In place of a setting that a run has not.
MISSING = object()
MOST_RUNS = 50
#: Beyond, runs are the rows of the table.
MOST_COLUMNS = 8
#: Of more metrics those are compared that most of the runs have.
MOST_METRICS = 100


@dataclass(frozen=True)
class Figure:
    """A value of one run. ratio: to the reference, if both are finite."""

    value: float | None
    ratio: float | None


@dataclass(frozen=True)
class Column:
    """One run of a comparison. device: empty until it has trained.  figures: the last value, by
    name of the metric, or loss.  best: the best one, where it is known which way that is.
    """

    label: str
    run: RunSummary
    device: str
    figures: dict[str, Figure]
    best: dict[str, Figure]


@dataclass(frozen=True)
class Row:
    """A row of the table, one cell a run. kind: how a cell is shown; name: of a figure or setting.

    winners: the places of the runs that have the best.
    """

    kind: str
    name: str
    label: str
    values: list[Any]
    winners: frozenset[int] = frozenset()

    @property
    def key(self) -> str:
        """What it is known by while the page changes."""
        return self.name if self.kind in ("figure", "fact") else f"{self.kind}.{self.name}"


@dataclass(frozen=True)
class Comparison:
    """names: of the figures, in order; differences: fields of which runs have unequal values.

    settings: all fields.  winners: by name of a figure, or of a best one in `best_winners`, which
    runs have the best, by their places.
    reference: the label of the run that ratios are to: fp32's, or the first of runs of one
    precision.  left_out: precisions that no worker offered when such a comparison was queued.
    is_on_cpu: some run trains on a CPU, or all will.
    missing: numbers of runs that there are not.
    step_metrics: metrics that some run's script has defined as x axes.
    """

    columns: list[Column]
    names: list[str]
    settings: list[tuple[str, list[Any]]]
    winners: dict[str, frozenset[int]]
    best_winners: dict[str, frozenset[int]]
    reference: str = ""
    left_out: list[str] = field(default_factory=list)
    is_on_cpu: bool = False
    is_of_precisions: bool = False
    missing: list[int] = field(default_factory=list)
    step_metrics: list[str] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        """The run ids, in order."""
        return [column.run.id for column in self.columns]

    @property
    def places(self) -> dict[int, int]:
        """The place of each run's line, which its colour and its dashes go by."""
        return run_colors.places(self.ids)

    @property
    def differences(self) -> list[tuple[str, list[Any]]]:
        """Return the settings that differ; None where a run lacks one."""
        return [
            (path, [None if each is MISSING else each for each in values])
            for path, values in self._differing
        ]

    @property
    def _differing(self) -> list[tuple[str, list[Any]]]:
        return [row for row in self.settings if len(set(map(repr, row[1]))) > 1]

    @property
    def is_sideways(self) -> bool:
        """Whether runs are rows of the table: many columns of numbers read better than of runs."""
        return len(self.columns) > MOST_COLUMNS

    def rows(self, *, every_setting: bool = False) -> Iterator[Row]:
        """Yield the rows of the table. every_setting: those too that are the same in all runs."""
        nobody: list[Any] = [None] * len(self.columns)
        for name, label in (("status", "Status"), ("verdict", "Health"), ("step", "Steps")):
            yield Row("fact", name, label, nobody)
        yield Row("fact", "skipped", "Skipped", nobody, self.winners["skipped"])
        for name in self.names:
            label = LABELS.get(name, name)
            figures = [column.figures[name] for column in self.columns]
            yield Row("figure", name, label, figures, self.winners[name])
            if any(name in column.best for column in self.columns):
                best = [column.best.get(name, Figure(None, None)) for column in self.columns]
                label = "Lowest loss" if name == "loss" else f"{label}, best"
                yield Row("best", name, label, best, self.best_winners[name])
        for path, values in self.settings if every_setting else self._differing:
            texts = ["–" if each is MISSING else formats.value(each) for each in values]
            yield Row("config", path, path, texts)
        yield Row("fact", "device", "Device", [column.device for column in self.columns])

    @property
    def has_devices_that_differ(self) -> bool:
        """Whether the runs used different devices, which affects their times."""
        return len({column.device for column in self.columns} - {""}) > 1

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen."""
        return all(column.run.is_over for column in self.columns)


def queue(session: Session, user: User, source: Run) -> list[Run]:
    """Queue a run's configuration and seed in each precision; the first is named by their group.

    Raises Invalid if the recipe no longer takes this configuration, Conflict if
    the run has no recipe.
    """
    runs.check_has_recipe(source, "be compared with others of its configuration")
    has_own_name = source.name != f"{source.recipe}-{source.precision}"
    base = source.name if has_own_name else source.recipe
    queued = []
    for label in variants(session, source):
        changes = groups.VARIANTS[label]
        config = deepcopy(source.config)
        for path, value in changes.items():
            config_schema.put(config, path, value)
        ending = f" {label}"
        submission = Submission(
            recipe=source.recipe,
            config=config,
            name=base[: LENGTHS["name"] - len(ending)] + ending,
            tags=source.tags,
            project=source.project,
            priority=most_priority(session, source.project, source.priority),
            nodes=source.nodes,
            devices_per_node=source.devices_per_node,
            parent_id=source.parent_id,
            parent_step=source.parent_step,
        )
        queued.append(submit(session, user, submission))
    for run in queued:
        run.group_id = queued[0].id
    return queued


def variants(session: Session, source: Run) -> list[str]:
    """Return the precisions that `queue` queues.

    Precisions that no worker offers are left out. Without workers, all but fp8 are included. TF32
    is included if all possible devices support it: others would silently train in fp32.
    """
    offered = workers.precisions_for(session, source.recipe)
    lacking = set() if workers.has_tf32(session, source.recipe) else {TF32}
    if not offered:
        lacking.add(FP8)
    return [
        label
        for label, changes in groups.VARIANTS.items()
        if (not offered or changes["precision"] in offered) and label not in lacking
    ]


def of_runs(session: Session, run_ids: Sequence[int], settings: Settings) -> Comparison:
    """Compare runs, in the given order.

    Runs that do not exist are listed as missing. Raises NotFound if none exists.
    """
    rows = {run.id: (run, owner) for run, owner in runs.with_owners(session, run_ids)}
    missing = [run_id for run_id in run_ids if run_id not in rows]
    if not rows:
        numbers = ", ".join(map(str, missing))
        are = "is no run" if len(missing) == 1 else "are no runs"
        raise NotFound(f"There {are} {numbers}.")
    members = [rows[run_id] for run_id in run_ids if run_id in rows]
    names = Counter(run.name for run, _owner in members)
    labels = [
        run.name if names[run.name] == 1 else f"{run.name} ({run.id})" for run, _owner in members
    ]
    return replace(_laid_out(session, members, labels, None, settings), missing=missing)


def of_group(session: Session, group_id: int, settings: Settings) -> Comparison:
    """Compare the runs of a group, with ratios. Raises NotFound."""
    members = groups.members(session, group_id)
    configs = [run.config for run, _owner in members]
    variants = [groups.variant(config) for config in configs]
    is_of_precisions = len(set(variants)) > 1
    first = variants.index("fp32") if "fp32" in variants else 0
    has_reference = variants[first] == "fp32" or not is_of_precisions
    # Few devices have fp8, and TF32 is no precision to ask for, but a setting of fp32.
    shown = {*variants, TF32, FP8}
    return replace(
        _laid_out(
            session, members, groups.labels(configs), first if has_reference else None, settings
        ),
        reference=variants[first],
        left_out=[each for each in groups.VARIANTS if each not in shown]
        if is_of_precisions
        else [],
        is_on_cpu=groups.is_on_cpu(session, group_id),
        is_of_precisions=is_of_precisions,
    )


def _laid_out(
    session: Session,
    members: list[tuple[Run, str]],
    labels: list[str],
    reference: int | None,
    settings: Settings,
) -> Comparison:
    """Compare runs. reference: index of the run that ratios refer to."""
    some_runs = [run for run, _owner in members]
    ids, configs = [run.id for run in some_runs], [run.settings for run in some_runs]
    names = comparisons.metric_names(session, ids, most=MOST_METRICS)
    measured = windows.measured_of(session, ids, names={*names, *MEASURED})
    told = {run.id: _not_ours(run, measured[run.id]) for run in some_runs}
    losses = comparisons.lowest_losses(session, ids)
    summaries = summarise_all(session, members, settings)
    is_low = {name: metric_direction.lowest(name, configs) for name in ("loss", *names)}
    last = [
        _last(run, told[run.id], summary.seconds)
        for run, summary in zip(some_runs, summaries, strict=True)
    ]
    best = [_best(losses.get(run.id), told[run.id], is_low) for run in some_runs]
    base, base_best = ({}, {}) if reference is None else (last[reference], best[reference])
    own = dict.fromkeys(name for figures in last for name in figures)
    shown = [STEP, *MEASURED, "seconds", "loss", *(name for name in own if name not in LABELS)]
    devices = groups.devices(session, ids)
    columns = [
        Column(
            label,
            summary,
            devices.get(run.id, "") or str((run.workload or {}).get("device") or ""),
            {name: _figure(name, mine, base) for name in shown},
            {name: _figure(name, peaks, base_best) for name in shown if name in peaks},
        )
        for label, run, summary, mine, peaks in zip(
            labels, some_runs, summaries, last, best, strict=True
        )
    ]
    return Comparison(
        columns,
        shown,
        _settings(some_runs),
        {name: _winners(name, last, is_low.get(name), some_runs) for name in shown}
        | {"skipped": _least_skipped(summaries)},
        {name: _winners(name, best, is_low.get(name), some_runs) for name in shown},
        step_metrics=step_metrics_of([run.whole_config for run in some_runs]),
    )


def _not_ours(run: Run, told: list[windows.Measured]) -> list[windows.Measured]:
    """Return the metrics that do not go by the name of what is recorded of the run itself."""
    ours = {STEP, "seconds", "loss"} if run.step else {STEP, "seconds"}
    return [each for each in told if each.name not in ours]


def _last(run: Run, told: list[windows.Measured], seconds: float | None) -> dict[str, float | None]:
    """Return the latest value of metrics and loss; time and memory for complete runs only."""
    metrics = {each.name: each.value for each in told}
    if run.step:
        metrics["loss"] = math.nan if run.loss is None else run.loss
    if run.steps_per_second:
        metrics[STEP] = 1000 / run.steps_per_second
    if run.status in ENDED:
        if seconds is not None:
            metrics["seconds"] = seconds
    else:
        metrics = {name: metrics[name] for name in metrics if name not in MEASURED}
    return {name: math.nan if value is None else value for name, value in metrics.items()}


def _best(
    lowest_loss: float | None, told: list[windows.Measured], is_low: dict[str, bool | None]
) -> dict[str, float | None]:
    """Return the best value of the loss and of each metric with a known direction."""
    found = {} if lowest_loss is None else {"loss": lowest_loss}
    for each in told:
        value = each.low if is_low.get(each.name) else each.high
        is_known = is_low.get(each.name) is not None and not each.name.startswith("run/")
        if is_known and value is not None:
            found[each.name] = value
    return dict(found)


def _figure(name: str, mine: dict[str, float | None], base: dict[str, float | None]) -> Figure:
    value, reference = mine.get(name), base.get(name)
    if value is None or not reference or not math.isfinite(value / reference):
        return Figure(value, None)
    return Figure(value, value / reference)


def _winners(
    name: str,
    figures: list[dict[str, float | None]],
    is_low: bool | None,
    some_runs: list[Run],
) -> frozenset[int]:
    """Return the indexes of the runs with the best value, if the direction is known."""
    is_low = True if name in (STEP, *MEASURED, "seconds") else is_low
    if is_low is None:
        return frozenset()
    if name in OF_LENGTH and len({(run.own_steps, run.status) for run in some_runs}) > 1:
        return frozenset()  # the one that did less was not faster for it
    return metric_direction.best([each.get(name) for each in figures], is_lowest=is_low)


def _least_skipped(summaries: list[RunSummary]) -> frozenset[int]:
    """Return the runs with the lowest share of skips; only runs with a loss scale count."""
    shares = [
        each.skipped / each.own_steps if each.own_steps and each.is_scaled else None
        for each in summaries
    ]
    return metric_direction.best(shares, is_lowest=True)


def _settings(some_runs: list[Run]) -> list[tuple[str, list[Any]]]:
    """Return all settings by path, each with the value of every run, or MISSING."""
    flat = [_flat(run) for run in some_runs]
    paths = dict.fromkeys(path for each in flat for path in each)
    return [(path, [each.get(path, MISSING) for each in flat]) for path in paths]


def _flat(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = {"recipe": run.recipe} if run.recipe else {}
    if run.command:
        found |= {"command": run.command["line"], "commit": run.command["commit"]}
    found |= {"precision": run.precision} | dict(config_schema.flat(run.whole_config))
    if run.source == RECIPE and "scaler.enabled" in found:
        # What a precision without a scale is told is not so.
        found["scaler.enabled"] = verdict.is_scaled(run.config)
    return found
