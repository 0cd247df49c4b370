"""Parity over seeds: whether groups of runs are as good as a reference, worse, better, or unknown.

Groups differ in their precision or in another setting. A run is paired with the run of the
reference that has the same seed: a recipe's initial weights and order of examples are equal then,
a script's if it seeds its generators by that setting. Where a seed has several runs in a group, as
in a grid over further settings, runs are paired within each combination of these. Each combination
is a test of its own: a precision may be as good with one learning rate and worse with another, and
pairs of different combinations that share a seed are not independent.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sqlalchemy.orm import Session

from app.compare.comparison import LABELS, Column, Comparison, differences
from app.compare.equivalence import PairedTest, compare_pairs
from app.compare.run_labels import MISSING
from db.errors import Invalid, StepsNotConverted
from db.runs import curves, groups
from db.runs.curves import CurveRange
from db.tables import Status
from halfstep import number_formats

#: What is compared of a metric: its last value, its mean over the curve, or seconds to a target.
Value = Literal["final", "area", "time_to_target"]
Conclusion = Literal["equivalent", "worse", "better", "lower", "higher", "undecided", "unknown"]

PRECISION, SEED = "precision", "training.seed"
OF_PRECISION = (PRECISION, "scaler.enabled", "training.tf32")
#: Settings that a precision's name includes where they differ; runs may be grouped by each as well.
OF_MODULES = ("modules.fp32", "modules.bf16")
#: Settings that may differ between groups of a precision.
OF_MIX = (*OF_PRECISION, *OF_MODULES, "scaler.init_scale")
#: Limit of names in a reason.
MOST_NAMED = 3


@dataclass(frozen=True)
class ParityQuery:
    """Parameters of a parity comparison."""

    metric: str = ""  # default: the first, else the loss
    margin: float | None = None
    group: str = ""  # a setting that differs; default: the precision, else the only one
    value: Value = "final"
    target: float | None = None  # of time_to_target


@dataclass(frozen=True)
class Pair:
    """Two runs with the same seed, and their values."""

    seed: str
    run: int
    reference_run: int
    value: float | None  # None if it has none, or if it was not read
    reference_value: float | None

    @property
    def difference(self) -> float | None:
        """The value minus that of the reference."""
        if self.value is None or self.reference_value is None:
            return None
        return self.value - self.reference_value


@dataclass(frozen=True)
class GroupParity:
    """A group of runs compared with the reference."""

    name: str
    conclusion: Conclusion
    pairs: list[Pair]
    result: PairedTest
    also_differ: list[str]  # settings other than the chosen one in which runs of a pair differ
    combination: dict[str, str]  # of a grid: settings that all of its runs share, with their values
    range: CurveRange | None = None  # of an area

    @property
    def label(self) -> str:
        """The name, and the combination."""
        shared = ", ".join(f"{path} {value}" for path, value in self.combination.items())
        return f"{self.name} at {shared}" if shared else self.name


@dataclass(frozen=True)
class Parity:
    """Groups of runs compared with one of them."""

    metric: str
    value: Value
    target: float | None
    margin: float | None
    is_metric_low: bool | None  # whether lower is better; None if unknown
    setting: str  # that the groups differ in
    seed: str  # setting that the runs of a pair share
    settings: list[str]  # that the runs differ in, apart from the seed
    reference: str = ""  # name of the group
    groups: Sequence[GroupParity] = ()
    reason: str = ""  # why there are no groups
    unpaired: Sequence[int] = ()  # runs in no pair

    @property
    def is_low(self) -> bool | None:
        """Whether lower values are better: times are."""
        return True if self.value == "time_to_target" else self.is_metric_low

    @property
    def paired_by(self) -> list[str]:
        """Settings that the runs of a pair share: the seed, and those of the combinations."""
        shared = dict.fromkeys(path for group in self.groups for path in group.combination)
        return [self.seed, *shared]


def is_seed(path: str) -> bool:
    """Return whether a setting is called seed."""
    return path.rpartition(".")[2] == "seed"


def has_steps(metric: str) -> bool:
    """Return whether a figure is recorded at steps, instead of once for the whole run."""
    return metric == curves.LOSS or metric not in LABELS


def usual_metric(compared: Comparison) -> str:
    """Return the first metric of the runs, or the loss."""
    return next((name for name in compared.names if name not in LABELS), "loss")


def direction(difference: float, is_low: bool | None) -> Conclusion:
    """Return better or worse for a difference; lower or higher if that is not known."""
    if is_low is None:
        return "lower" if difference < 0 else "higher"
    return "better" if is_low == (difference < 0) else "worse"


def shares_seeds(settings: Sequence[tuple[str, list[object]]]) -> bool:
    """Return whether two or more seeds are each used by several runs, and another setting differs.

    settings: of runs, as a comparison has them.
    """
    values = dict(settings)
    seed = _seed_setting(values)
    known = (own for own in values.get(seed, []) if own is not MISSING and own is not None)
    counts = Counter(map(repr, known))
    differ = any(len(set(map(repr, row))) > 1 for path, row in settings if path != seed)
    return differ and sum(count > 1 for count in counts.values()) > 1


def group_settings(settings: Sequence[tuple[str, list[object]]]) -> list[str]:
    """Return the settings that groups of runs can differ in. settings: as in `shares_seeds`."""
    seed = _seed_setting(dict(settings))
    return _choices(path for path, _ in differences(settings) if path != seed)


def parity_of(session: Session, compared: Comparison, query: ParityQuery) -> Parity:
    """Compare the runs' values of a metric, paired by seed. Raises Invalid."""
    metric, group = query.metric or usual_metric(compared), query.group
    if metric not in compared.names and compared.is_over:
        allowed = ", ".join(compared.names[:10])
        raise Invalid({"metric": f"no run has {metric[:100]!r}; allowed: {allowed}"})
    settings = group_settings(compared.settings)
    if group and group not in settings:
        allowed = ", ".join(settings[:10]) or "none, because no setting differs"
        raise Invalid({"group": f"no difference in {group[:100]!r}; allowed: {allowed}"})
    setting = group or (PRECISION if PRECISION in settings else "".join(settings[:1]))
    values = _values(compared)
    parity = Parity(
        metric,
        query.value,
        query.target,
        query.margin,
        compared.is_low.get(metric),
        setting,
        _seed_setting(values),
        settings,
        unpaired=compared.ids,
    )
    if reason := _why_not(parity, is_chosen=bool(group)):
        return replace(parity, reason=reason)
    members: dict[str, list[Column]] = {}
    for column in compared.columns:
        members.setdefault(_group_name(values, setting, column.run.id), []).append(column)
    parity = replace(parity, reference="fp32" if "fp32" in members else next(iter(members)))
    if len(members) == 1:
        return replace(parity, reason=f"all runs are of the group {parity.reference}")
    own = {parity.seed, *(OF_MIX if setting == PRECISION else (setting,))}
    differing = {path for path, _ in compared.differences} - own
    pairing = _Pairing(session, parity, compared, values, differing, is_chosen=bool(group))
    base = members.pop(parity.reference)
    results = [
        result
        for name, columns in members.items()
        for result in pairing.groups(name, columns, base)
    ]
    paired = {run for group in results for pair in group.pairs for run in _runs_of(pair)}
    unpaired = [run_id for run_id in compared.ids if run_id not in paired]
    return replace(parity, groups=results, unpaired=unpaired)


def _runs_of(pair: Pair) -> tuple[int, int]:
    return pair.run, pair.reference_run


_Settings = Mapping[str, Mapping[int, Any]]  # values by path and run id
_BySeed = dict[str, list[Column]]


def _values(compared: Comparison) -> _Settings:
    return {path: dict(zip(compared.ids, row, strict=True)) for path, row in compared.settings}


def _seed_setting(all_paths: Collection[str]) -> str:
    """Return the path of the seed; empty if there is none, or no standard one among several."""
    paths = [path for path in all_paths if is_seed(path)]
    return SEED if SEED in paths else paths[0] if len(paths) == 1 else ""


def _choices(paths: Iterable[str]) -> list[str]:
    """Return settings that groups can differ in, of which the precision has several paths."""
    return list(dict.fromkeys(PRECISION if path in OF_PRECISION else path for path in paths))


def _why_not(parity: Parity, *, is_chosen: bool) -> str:
    if not parity.seed:
        return f"the runs have neither the setting {SEED} nor exactly one setting called seed"
    if not parity.settings:
        return "the runs differ in no setting but the seed"
    if parity.value == "time_to_target" and parity.target is None:
        return "the value time_to_target needs a target"
    if parity.value == "time_to_target" and parity.is_metric_low is None:
        return (
            f"it is unknown whether lower or higher {parity.metric} is better, so neither is "
            "when it reaches a target"
        )
    if len(parity.settings) > 1 and not is_chosen and parity.setting != PRECISION:
        return f"the runs differ in {few(parity.settings)}: choose the one to compare"
    return ""


def _group_name(values: _Settings, setting: str, run_id: int) -> str:
    value = values[setting][run_id]
    if setting != PRECISION:
        return "not set" if value is MISSING else number_formats.setting(value)
    if not value:
        return "unknown precision"
    _, enabled, tf32, fp32, bf16 = (
        values.get(path, {}).get(run_id, MISSING) for path in (*OF_PRECISION, *OF_MODULES)
    )
    # The comparison gives the scaler as off in precisions without one.
    config = {
        "precision": value,
        "scaler": {"enabled": enabled is MISSING or enabled},
        "training": {"tf32": tf32 is not MISSING and tf32},
        "modules": {"fp32": [], "bf16": []},
    }
    differs = any(_differs(values.get(path, {})) for path in OF_MODULES)
    if differs:
        own = {"fp32": fp32, "bf16": bf16}
        config["modules"] = {name: list(at) for name, at in own.items() if isinstance(at, list)}
    return groups.full_name(config)


def _differs(row: Mapping[int, object]) -> bool:
    return len({repr(value) for value in row.values()}) > 1


@dataclass(frozen=True)
class _Measured:
    """The values of runs, or why they are not known."""

    values: Mapping[int, float]
    reason: str = ""
    range: CurveRange | None = None
    also_differ: Sequence[str] = ()  # what else differs between the runs of a pair


@dataclass(frozen=True)
class _Pairing:
    """Pairs of groups with the reference."""

    session: Session
    parity: Parity  # without groups yet
    compared: Comparison
    values: _Settings
    differing: Collection[str]  # paths of the other settings that differ
    is_chosen: bool  # the setting was chosen, so that others may differ

    def groups(
        self, name: str, columns: Sequence[Column], base: Sequence[Column]
    ) -> list[GroupParity]:
        """Compare a group with the reference, in each combination of settings of a grid."""
        crossed = self._find_crossed(columns, base)
        mine, references = (self._by_combination(some, crossed) for some in (columns, base))
        shared = [key for key in references if key in mine]
        if not shared:
            equal = few([self.parity.seed, *_choices(crossed)])
            text = f"no run of {name} has the {equal} of a run of {self.parity.reference}"
            return [GroupParity(name, "unknown", [], PairedTest("unknown", 0, text), [], {})]
        return [self._group(name, dict(key), mine[key], references[key]) for key in shared]

    def _find_crossed(self, columns: Sequence[Column], base: Sequence[Column]) -> list[str]:
        """Return the settings in which runs of one seed differ within a group, as in a grid.

        A setting without a common value, such as a name of each run, cannot pair any.
        """
        both = [self._by_seed(columns), self._by_seed(base)]
        return [
            path
            for path in self.values
            if path in self.differing
            and any(
                len(self._texts(path, runs)) > 1 for by_seed in both for runs in by_seed.values()
            )
            and self._texts(path, columns) & self._texts(path, base)
        ]

    def _texts(self, path: str, columns: Sequence[Column]) -> set[str]:
        return {repr(self.values[path][column.run.id]) for column in columns}

    def _by_seed(self, columns: Sequence[Column]) -> _BySeed:
        runs: _BySeed = {}
        for column in columns:
            seed = self.values[self.parity.seed][column.run.id]
            if seed is not MISSING and seed is not None:
                runs.setdefault(number_formats.setting(seed), []).append(column)
        return runs

    def _by_combination(
        self, columns: Sequence[Column], crossed: Sequence[str]
    ) -> dict[tuple[tuple[str, str], ...], list[Column]]:
        combinations: dict[tuple[tuple[str, str], ...], list[Column]] = {}
        for column in columns:
            key = [
                (path, _group_name(self.values, path, column.run.id)) for path in _choices(crossed)
            ]
            combinations.setdefault(tuple(key), []).append(column)
        return combinations

    def _group(
        self,
        name: str,
        combination: dict[str, str],
        columns: Sequence[Column],
        references: Sequence[Column],
    ) -> GroupParity:
        """Compare a group with the reference, or state why it cannot be compared.

        No pair is left out for its result: runs that failed may be the worst ones.
        """
        parity, mine, base = self.parity, self._by_seed(columns), self._by_seed(references)
        seeds = [seed for seed in base if seed in mine]
        runs = [(mine[seed][0], base[seed][0]) for seed in seeds]
        also_differ = self._also_differing(runs)
        both = [column for pair in runs for column in pair]
        unfinished = [column for column in both if column.run.status != Status.FINISHED]
        repeated = [seed for seed in seeds if len(mine[seed]) + len(base[seed]) > 2]
        reason = ""
        if not seeds:
            reason = f"no run of {name} has the seed of a run of {parity.reference}"
        elif repeated:
            reason = f"a group has several runs of seed {few(repeated)}; remove all but one"
        elif unfinished:
            reason = f"not finished: {_named(unfinished)}"
        elif not self.is_chosen:
            reason = _not_comparable(also_differ)
        needs_none = reason and parity.value != "final"
        measured = _Measured({}) if needs_none else self._measure(both)
        values, also_differ = measured.values, [*also_differ, *measured.also_differ]
        pairs = [
            Pair(
                seed,
                a.run.id,
                b.run.id,
                values.get(a.run.id),
                values.get(b.run.id),
            )
            for seed, (a, b) in zip(seeds, runs, strict=True)
        ]
        reason = reason or measured.reason
        reason = reason or ("" if self.is_chosen else _not_comparable(also_differ))
        result = (
            PairedTest("unknown", len(pairs), reason)
            if reason
            else compare_pairs(
                [math.nan if pair.value is None else pair.value for pair in pairs],
                [math.nan if p.reference_value is None else p.reference_value for p in pairs],
                parity.margin,
            )
        )
        conclusion = _conclusion(result, parity.is_low)
        return GroupParity(
            name, conclusion, pairs, result, also_differ, combination, measured.range
        )

    def _also_differing(self, runs: Sequence[tuple[Column, Column]]) -> list[str]:
        """Return in what else the runs of a pair differ."""
        differing = _choices(
            path
            for path in self.values
            if path in self.differing and any(len(self._texts(path, pair)) > 1 for pair in runs)
        )
        is_time = self.parity.value == "time_to_target"  # which may end a run early
        if not is_time and any(a.run.own_steps != b.run.own_steps for a, b in runs):
            differing.append("the number of their steps")
        if any((a.run.parent_step is None) != (b.run.parent_step is None) for a, b in runs):
            differing.append("whether they continue a checkpoint")
        elif any(_parent(a) != _parent(b) for a, b in runs):
            differing.append("their parent")
        if any(_size(a) != _size(b) for a, b in runs):
            differing.append("their nodes or devices")
        if is_time and not all(column.device for pair in runs for column in pair):
            differing.append("possibly their device, which is unknown")
        elif is_time and any(a.device != b.device for a, b in runs):
            differing.append("their device")
        return differing

    def _measure(self, columns: Sequence[Column]) -> _Measured:
        """Return the values of runs that are compared with each other."""
        if self.parity.value == "final":
            return self._last(columns)
        without = [column for column in columns if not _has_curve(column, self.parity.metric)]
        if without:
            return _Measured({}, self._why("no curve of {}", without))
        try:
            return self._means(columns) if self.parity.value == "area" else self._times(columns)
        except StepsNotConverted:
            return _Measured({}, "the steps of a run are being converted after an upgrade")

    def _last(self, columns: Sequence[Column]) -> _Measured:
        found = ((column, _last_value(column, self.parity.metric)) for column in columns)
        values = {column.run.id: value for column, value in found if value is not None}
        unknown = [
            column for column in columns if not math.isfinite(values.get(column.run.id, math.nan))
        ]
        return _Measured(values, self._why("no finite {}", unknown))

    def _means(self, columns: Sequence[Column]) -> _Measured:
        metric, ids = self.parity.metric, [column.run.id for column in columns]
        own = curves.read_curves(self.session, ids, metric)
        if missing := [column for column in columns if column.run.id not in own]:
            return _Measured({}, self._why("no finite {}", missing))
        if unknown := [column for column in columns if not own[column.run.id].is_finite]:
            text = "a NaN, infinite or unknown value in the curve of {}"
            return _Measured({}, self._why(text, unknown))
        try:
            shared, means = curves.areas(self.session, metric, own)
        except curves.NotComparable as error:
            return _Measured({}, str(error))
        return _Measured(means, "", shared)

    def _times(self, columns: Sequence[Column]) -> _Measured:
        parity, ids = self.parity, [column.run.id for column in columns]
        if interrupted := [column for column in columns if column.run.attempt > 1]:
            text = "interrupted, so the time to target is unknown"
            return _Measured({}, f"{text}: {_named(interrupted)}")
        if parity.target is None or parity.is_metric_low is None:  # `_why_not` has the reason
            return _Measured({})
        values = curves.seconds_until(
            self.session, ids, parity.metric, parity.target, is_low=parity.is_metric_low
        )
        never = [column for column in columns if column.run.id not in values]
        if never:
            text = "{} never reaches " + number_formats.setting(parity.target)
            return _Measured(values, self._why(text, never))
        own = curves.read_curves(self.session, ids, parity.metric)
        pairs = zip(ids[::2], ids[1::2], strict=True)
        is_same = all(curves.have_same_steps(own[a], own[b]) for a, b in pairs)
        # A run that is evaluated more often is seen to reach the target earlier.
        return _Measured(
            values,
            also_differ=[] if is_same else [f"the steps at which {parity.metric} is recorded"],
        )

    def _why(self, text: str, columns: Sequence[Column]) -> str:
        """Return a reason with the metric and the runs, if there are any."""
        return f"{text.format(self.parity.metric)}: {_named(columns)}" if columns else ""


def _not_comparable(also_differ: Sequence[str]) -> str:
    if not also_differ:
        return ""
    return f"not comparable: runs of a pair also differ in {few(also_differ)}"


def _parent(column: Column) -> tuple[int | None, int | None]:
    return column.run.parent_id, column.run.parent_step


def _size(column: Column) -> tuple[int, int]:
    return column.run.nodes, column.run.devices_per_node


def _has_curve(column: Column, metric: str) -> bool:
    """Return whether a run has recorded values of a metric at its steps."""
    figure = column.figures.get(metric)
    return has_steps(metric) and figure is not None and figure.value is not None


def _last_value(column: Column, metric: str) -> float | None:
    """Return a run's last value; None if it has none."""
    figure = column.figures.get(metric)
    return None if figure is None else figure.value


def _conclusion(result: PairedTest, is_low: bool | None) -> Conclusion:
    is_directed = result.decision in ("lower", "higher")
    return direction(result.difference or 0.0, is_low) if is_directed else result.decision


def _named(columns: Sequence[Column]) -> str:
    runs = sorted((column.run for column in columns), key=lambda run: run.id)
    return few([f"run {run.id} ({run.status})" for run in runs])


def few(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(name[:100] for name in names[:MOST_NAMED]) + more
