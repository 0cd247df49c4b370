"""Comparisons of runs: any runs, or a group with ratios to one of them.

A group is one configuration in several precisions, with ratios to fp32; or a run and its forks with
a module in fp32, with ratios to the run.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy.orm import Session

from app.compare import run_colors, run_labels
from app.compare.run_labels import MISSING
from app.runs.summary import RunSummary, summarise_all
from app.submission import config_schema
from app.submission.submission import LENGTHS, Submission, most_priority, submit
from app.telemetry import metric_direction
from app.telemetry.step_metrics import step_metrics_of
from db.errors import Conflict, NotFound
from db.health import scaling_health
from db.names import natural_key
from db.queue import workers
from db.queue.pending_reasons import Queue
from db.runs import comparisons, groups, runs
from db.runs.command_spec import read_command
from db.runs.groups import FP8, TF32
from db.settings import Settings
from db.tables import ENDED, RECIPE, TRAIN, Run, User
from db.telemetry import damage, latest_metrics, windows
from halfstep.telemetry.plain_json import JsonObject

#: Metrics of every recipe; the recipe's own metrics follow.
MEASURED = {"run/seconds": "Training time", "run/peak_memory_bytes": "Peak memory"}
#: Time of the last steps, comparable between runs of different length, such as a run and its fork.
STEP = "run/step_ms"
LABELS = {STEP: "Time per step", **MEASURED, "seconds": "Time with setup", "loss": "Last loss"}
#: Lower is better, but only between complete runs of the same length.
OF_LENGTH = ("run/seconds", "seconds")
MOST_RUNS = 50
#: Limit of the seeds that a comparison in all precisions is queued with, so that it has fewer runs.
MOST_SEEDS = MOST_RUNS // len(groups.VARIANTS)
#: Groups runs by all settings in which they differ but the seed; legend.js has it too.
BUT_SEED = "except:seed"
#: Number of possible seeds.
SEEDS = 2**32
#: Limit of a variant's label in the name of its run.
NAME_OF_VARIANT = 60
#: With more runs, runs are the rows of the table.
MOST_COLUMNS = 8
#: Limit of compared metrics; those that most of the runs have are preferred.
MOST_METRICS = 100

#: Series of steps that can be drawn, with their labels; metrics are drawn by name.
SERIES = {
    "loss": "Loss",
    "scale": "Loss scale",
    "grad_norm": "Gradient norm",
    "grad_norm_clipped": "Gradient norm after clipping",
    "lr": "Learning rate",
    "step_us": "Time per step, ms",
    "examples_per_second": "Examples per second",
    "data_us": "Waiting for data, ms",
}
#: Panels, which all fit into an address.
MOST_DRAWN = 12
#: X axes, in addition to `metric:NAME` of a metric that a run's script has defined as an axis.
AXES = ("step", "applied", "time", "examples")


@dataclass(frozen=True)
class Figure:
    """A value of one run."""

    value: float | None
    ratio: float | None  # to the reference, if both are finite


@dataclass(frozen=True)
class Column:
    """One run of a comparison."""

    label: str
    run: RunSummary
    device: str  # empty until it has trained
    figures: dict[str, Figure]  # last values by name of the metric, or loss
    best: dict[str, Figure]  # best values, if the direction is known


@dataclass(frozen=True)
class Row:
    """A row of the table, with one cell per run."""

    kind: str  # format of the cells
    name: str  # of a figure or setting
    label: str
    values: list[Any]
    winners: frozenset[int] = frozenset()  # indexes of the runs with the best value
    differs: bool = False  # a setting with several values

    @property
    def key(self) -> str:
        """Key of the row in updates of the page."""
        return self.name if self.kind in ("figure", "fact") else f"{self.kind}.{self.name}"


@dataclass(frozen=True)
class Comparison:
    """A comparison of runs."""

    columns: list[Column]
    names: list[str]  # of the figures, in order
    settings: list[tuple[str, list[Any]]]  # all settings with the value of each run
    winners: dict[str, frozenset[int]]  # indexes of the best runs by figure
    best_winners: dict[str, frozenset[int]]  # likewise by best value of a figure
    reference: str = ""  # label of the run for ratios: fp32's, or the first with one precision
    left_out: list[str] = field(default_factory=list)  # precisions that no worker offered
    is_on_cpu: bool = False  # a run trains on a CPU, or all will
    is_of_precisions: bool = False
    missing: list[int] = field(default_factory=list)  # ids of runs that do not exist
    step_metrics: list[str] = field(default_factory=list)  # x axes that scripts have defined
    is_low: dict[str, bool | None] = field(default_factory=dict)  # by figure; None: unknown
    settings_total: int = 0  # as on the page of a run: without the names of recipe and command

    @property
    def low(self) -> list[str]:
        """The figures of which lower values are better."""
        return [name for name, is_low in self.is_low.items() if is_low]

    @property
    def groupings(self) -> dict[str, str]:
        """Settings by which runs can be averaged, with labels; one option is all but the seed."""
        paths = [path for path, _values in self.differences]
        has_seeds = any(path.rpartition(".")[2] == "seed" for path in paths)
        but_seed = {BUT_SEED: "Mean over seeds"} if has_seeds else {}
        return but_seed | {path: f"Mean by {path}" for path in paths}

    @property
    def ids(self) -> list[int]:
        """The run ids, in order."""
        return [column.run.id for column in self.columns]

    @property
    def places(self) -> dict[int, int]:
        """The place of each run's line, which its colour and its dashes go by."""
        return run_colors.places(self.ids)

    @property
    def differences(self) -> list[tuple[str, list[object]]]:
        """Settings that differ; None for a run without the setting."""
        return [
            (path, [None if value is MISSING else value for value in values])
            for path, values in self._differing
        ]

    @property
    def _differing(self) -> list[tuple[str, list[object]]]:
        return differences(self.settings)

    @property
    def known_differences(self) -> list[str]:
        """Paths of the settings that have several values."""
        return [path for path, values in self._differing if _has_several(values)]

    @property
    def _distinguishing(self) -> list[tuple[str, list[object]]]:
        """Settings that differ, without the scaler's switch if it follows from the precision."""
        differing = self._differing
        values = dict(differing)
        precisions = values.get("precision", [])
        pairs = set(zip(precisions, map(repr, values.get("scaler.enabled", [])), strict=False))
        is_implied = bool(precisions) and len(pairs) == len(set(precisions))
        return [row for row in differing if row[0] != "scaler.enabled" or not is_implied]

    def legend_figures(self, pinned: Sequence[str] = ()) -> list[str]:
        """Names of the figures in the legend: the loss and a metric, where runs have them."""
        metrics = sorted((name for name in self.names if name not in LABELS), key=self.relevance)
        metrics.sort(key=lambda name: name not in pinned)
        return [name for name in ["loss", *metrics[:1]] if self.runs_with(name)]

    def runs_with(self, name: str) -> int:
        """Return how many runs have a figure."""
        return sum(column.figures[name].value is not None for column in self.columns)

    def relevance(self, name: str) -> tuple[bool, int, bool, bool, tuple[str, str]]:
        """Return the sort key of a metric: first those of most runs, then those of evaluations.

        Names that only count, such as "epoch", come last; of others those that end in a number.
        """
        lower = name.lower()
        is_evaluation = lower.startswith(latest_metrics.EVALUATIONS)
        is_counter = lower in latest_metrics.COUNTERS
        is_numbered = latest_metrics.is_numbered(name)
        return is_counter, -self.runs_with(name), not is_evaluation, is_numbered, natural_key(name)

    @property
    def labels(self) -> dict[int, str]:
        """Labels by run id, all different."""
        names = [column.label for column in self.columns]
        return run_labels.label(self.ids, names, self._labelling)

    @property
    def label_settings(self) -> list[str]:
        """The settings whose values the labels are; empty: they are names."""
        return [path for path, _values in self._labelling]

    @property
    def _labelling(self) -> run_labels.Settings:
        """The settings of the labels; empty: they are names."""
        if self.reference:
            return []
        own_names = [column.run.name for column in self.columns]
        return run_labels.choose_settings(self._distinguishing, own_names)

    @property
    def is_sideways(self) -> bool:
        """Whether runs are the rows of the table, which is more readable for many runs."""
        return len(self.columns) > MOST_COLUMNS

    def rows(self, *, every_setting: bool = False) -> Iterator[Row]:
        """Yield the rows of the table. every_setting: also settings that are equal in all runs."""
        empty: list[Any] = [None] * len(self.columns)
        differing = self._differing
        for path, values in differing:
            yield Row("config", path, path, run_labels.texts(values), differs=_has_several(values))
        for name, label in (("status", "Status"), ("health", "Scale health"), ("step", "Steps")):
            yield Row("fact", name, label, empty)
        yield Row("fact", "skipped", "Skipped", empty, self.winners["skipped"])
        for name in self.names:
            label = LABELS.get(name, name)
            figures = [column.figures[name] for column in self.columns]
            yield Row("figure", name, label, figures, self.winners[name])
            if any(name in column.best for column in self.columns):
                best = [column.best.get(name, Figure(None, None)) for column in self.columns]
                label = "Lowest loss" if name == "loss" else f"{label}, best"
                yield Row("best", name, label, best, self.best_winners[name])
        yield Row("fact", "device", "Device", [column.device for column in self.columns])
        shown = {path for path, _values in differing}
        for path, values in self.settings if every_setting else ():
            if path not in shown:
                yield Row("config", path, path, run_labels.texts(values))

    @property
    def has_devices_that_differ(self) -> bool:
        """Whether the runs used different devices, which affects their times."""
        return len({column.device for column in self.columns} - {""}) > 1

    @property
    def is_over(self) -> bool:
        """Whether all runs have ended."""
        return all(column.run.is_over for column in self.columns)


def queue(session: Session, user: User, source: Run, seeds: int = 1) -> list[Run]:
    """Queue a run's configuration in each precision: a group for its seed, and for following ones.

    Raises Invalid if the recipe no longer accepts this configuration, Conflict if the run has no
    recipe, or trains nothing.
    """
    runs.check_has_recipe(source, "be compared with others of its configuration")
    if source.task != TRAIN:
        raise Conflict(f"Run {source.id} does not train: there is nothing to compare.")
    changes = [(label, groups.VARIANTS[label]) for label in variants(session, source)]
    return queue_variants(session, user, source, changes, seeds, source.config)


def queue_variants(
    session: Session,
    user: User,
    source: Run,
    changes: Sequence[tuple[str, Mapping[str, object]]],
    seeds: int,
    config: JsonObject,
) -> list[Run]:
    """Queue a configuration with changes, as a run was: a group for its seed, and for further ones.

    changes: labels, and values by path.  Raises Invalid.
    """
    first, queued = config.get("training", {}).get("seed", 0), []
    for seed in [(first + number) % SEEDS for number in range(seeds)] if seeds > 1 else [None]:
        group = [_queue_variant(session, user, source, config, *change, seed) for change in changes]
        for run in group:
            run.group_id = group[0].id
        queued += group
    return queued


def _queue_variant(
    session: Session,
    user: User,
    source: Run,
    config: JsonObject,
    label: str,
    changes: Mapping[str, object],
    seed: int | None,
) -> Run:
    config, ending = deepcopy(config), f" {label}"[:NAME_OF_VARIANT]
    for path, value in changes.items():
        config_schema.put(config, path, value)
    if seed is not None:
        config_schema.put(config, "training.seed", seed)
        ending += f" seed {seed}"
    is_training = source.task == TRAIN
    has_own_name = is_training and source.name != f"{source.recipe}-{source.precision}"
    base = source.name if has_own_name else source.recipe
    submission = Submission(
        recipe=source.recipe,
        config=config,
        name=base[: LENGTHS["name"] - len(ending)] + ending,
        tags=source.tags,
        project=source.project,
        priority=most_priority(session, source.project, source.priority),
        preemptible=source.preemptible and is_training,
        nodes=source.nodes,
        devices_per_node=source.devices_per_node,
        parent_id=source.parent_id if is_training else None,
        parent_step=source.parent_step if is_training else None,
    )
    return submit(session, user, submission)


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


def of_runs(
    session: Session,
    run_ids: Sequence[int],
    settings: Settings,
    metrics: Iterable[str] = (),
    queue: Queue | None = None,
) -> Comparison:
    """Compare runs, in the given order.

    Runs that do not exist are listed as missing. Those of one group have ratios to its fp32 run.
    metrics: compared even if few of the runs have them.  queue: if it is already read. Raises
    NotFound if none exists.
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
    some_groups = {run.group_id for run, _owner in members}
    is_group = len(members) > 1 and len(some_groups) == 1 and None not in some_groups
    variants = [groups.variant(run.config) for run, _owner in members] if is_group else []
    first = variants.index("fp32") if variants.count("fp32") == 1 else None
    compared = _compare(session, members, labels, first, settings, metrics, queue)
    if first is not None:
        compared = replace(compared, reference="fp32", is_of_precisions=True)
    return replace(compared, missing=missing)


def of_group(
    session: Session,
    group_id: int,
    settings: Settings,
    metrics: Iterable[str] = (),
    queue: Queue | None = None,
) -> Comparison:
    """Compare the runs of a group, with ratios; arguments as of `of_runs`. Raises NotFound."""
    members = groups.members(session, group_id)
    configs = [run.config for run, _owner in members]
    variants = [groups.variant(config) for config in configs]
    is_of_precisions = len(set(variants)) > 1
    first = variants.index("fp32") if "fp32" in variants else 0
    has_reference = variants[first] == "fp32" or not is_of_precisions
    # Few devices support fp8, and TF32 is a setting of fp32 and not a precision.
    shown = {*variants, TF32, FP8}
    return replace(
        _compare(
            session,
            members,
            groups.labels(configs),
            first if has_reference else None,
            settings,
            metrics,
            queue,
        ),
        reference=variants[first],
        left_out=[variant for variant in groups.VARIANTS if variant not in shown]
        if is_of_precisions
        else [],
        is_on_cpu=groups.is_on_cpu(session, group_id),
        is_of_precisions=is_of_precisions,
    )


def _compare(
    session: Session,
    members: list[tuple[Run, str]],
    labels: list[str],
    reference: int | None,
    settings: Settings,
    metrics: Iterable[str],
    queue: Queue | None,
) -> Comparison:
    """Compare runs. reference: index of the run that ratios refer to."""
    some_runs = [run for run, _owner in members]
    ids, configs = [run.id for run in some_runs], [run.settings for run in some_runs]
    names = comparisons.metric_names(session, ids, most=MOST_METRICS)
    names = [*dict.fromkeys((*names, *metrics))]
    measured = windows.measure_by_run(session, ids, names={*names, *MEASURED})
    own_metrics = {run.id: _select_own_metrics(run, measured[run.id]) for run in some_runs}
    losses = comparisons.lowest_losses(session, ids)
    summaries = summarise_all(session, members, settings, queue)
    damage.note_all([run.damage for run in some_runs])
    is_low = {name: metric_direction.lowest(name, configs) for name in ("loss", *names)}
    is_low |= dict.fromkeys((STEP, *MEASURED, "seconds"), True)
    last = [
        _last(run, own_metrics[run.id], summary.seconds)
        for run, summary in zip(some_runs, summaries, strict=True)
    ]
    best = [_best(losses.get(run.id), own_metrics[run.id], is_low) for run in some_runs]
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
        settings_of(some_runs),
        {name: _winners(name, last, is_low.get(name), some_runs) for name in shown}
        | {"skipped": _least_skipped(summaries)},
        {name: _winners(name, best, is_low.get(name), some_runs) for name in shown},
        step_metrics=step_metrics_of(some_runs),
        is_low=is_low,
        settings_total=len(
            {path for run in some_runs for path, _ in config_schema.flat(run.whole_config)}
        ),
    )


def differences(settings: Sequence[tuple[str, list[object]]]) -> list[tuple[str, list[object]]]:
    """Return settings that differ; those that only some runs have, with one value, come last."""
    differing = [row for row in settings if len(set(map(repr, row[1]))) > 1]
    return sorted(differing, key=lambda row: not _has_several(row[1]))


def _has_several(values: list[object]) -> bool:
    """Return whether runs that have a setting have different values of it."""
    return len({repr(value) for value in values if value is not MISSING}) > 1


def _select_own_metrics(run: Run, measured: list[windows.Measured]) -> list[windows.Measured]:
    """Return the metrics without those that have the name of a recorded figure of the run."""
    reserved = {STEP, "seconds", "loss"} if _has_loss(run) else {STEP, "seconds"}
    return [metric for metric in measured if metric.name not in reserved]


def _has_loss(run: Run) -> bool:
    """Return whether the loss of a run is known, if only as a NaN."""
    return run.known_loss is not None


def _last(
    run: Run, measured: list[windows.Measured], seconds: float | None
) -> dict[str, float | None]:
    """Return the latest value of metrics and loss; time and memory for complete runs only."""
    metrics: dict[str, float | None] = {metric.name: metric.value for metric in measured}
    if _has_loss(run):
        metrics["loss"] = run.known_loss
    if run.steps_per_second:
        metrics[STEP] = 1000 / run.steps_per_second
    if run.status in ENDED:
        if seconds is not None:
            metrics["seconds"] = seconds
    else:
        metrics = {name: metrics[name] for name in metrics if name not in MEASURED}
    return metrics


def _best(
    lowest_loss: float | None, measured: list[windows.Measured], is_low: dict[str, bool | None]
) -> dict[str, float | None]:
    """Return the best value of the loss and of each metric with a known direction."""
    best = {} if lowest_loss is None else {"loss": lowest_loss}
    for metric in measured:
        value = metric.low if is_low.get(metric.name) else metric.high
        is_known = is_low.get(metric.name) is not None and not metric.name.startswith("run/")
        if is_known and value is not None:
            best[metric.name] = value
    return dict(best)


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
    if is_low is None:
        return frozenset()
    if name in OF_LENGTH and len({(run.own_steps, run.status) for run in some_runs}) > 1:
        return frozenset()  # runs of different length are not comparable
    return metric_direction.best([values.get(name) for values in figures], is_lowest=is_low)


def _least_skipped(summaries: list[RunSummary]) -> frozenset[int]:
    """Return the runs with the lowest share of skips; none if one without a loss scale has less."""
    shares = [run.skipped / run.own_steps if run.own_steps else None for run in summaries]
    best = metric_direction.best(shares, is_lowest=True)
    return best if all(summaries[place].is_scaled for place in best) else frozenset()


def settings_of(some_runs: Sequence[Run]) -> list[tuple[str, list[object]]]:
    """Return all settings by path, each with the value of every run, or MISSING."""
    flat = [_flat(run) for run in some_runs]
    paths = dict.fromkeys(path for config in flat for path in config)
    return [(path, [config.get(path, MISSING) for config in flat]) for path in paths]


def _flat(run: Run) -> dict[str, object]:
    flat: dict[str, Any] = {"recipe": run.recipe} if run.recipe else {}
    if run.command:
        command = read_command(run.command)
        flat |= {"command": command.line, "commit": command.commit}
    flat |= {"precision": run.precision} | dict(config_schema.flat(run.whole_config))
    if run.source == RECIPE and "scaler.enabled" in flat:
        # The setting has no effect in a precision without a loss scale.
        flat["scaler.enabled"] = scaling_health.is_scaled(run.config)
    return flat
