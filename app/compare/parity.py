"""Parity over seeds: whether groups of runs are as good as a reference, worse, better, or unknown.

Groups differ in their precision or in another setting. A run is paired with the run of the
reference that has the same seed: a recipe's initial weights and order of examples are equal then,
a script's if it seeds its generators by that setting.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from app.compare.comparison import LABELS, MISSING, Column, Comparison
from app.compare.equivalence import PairedTest, compare_pairs
from app.html import formats
from db.errors import Invalid
from db.runs import groups
from db.tables import Status

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
class Pair:
    """Two runs with the same seed, and their values of the metric."""

    seed: str
    run: int
    reference_run: int
    value: float  # NaN if it has none
    reference_value: float


@dataclass(frozen=True)
class GroupParity:
    """A group of runs compared with the reference."""

    name: str
    conclusion: Conclusion
    pairs: list[Pair]
    result: PairedTest
    also_differ: list[str]  # settings other than the chosen one in which runs of a pair differ


@dataclass(frozen=True)
class Parity:
    """Groups of runs compared with one of them."""

    metric: str
    margin: float | None
    is_low: bool | None  # whether lower is better; None if unknown
    setting: str  # that the groups differ in
    seed: str  # setting that the runs of a pair share
    settings: list[str]  # that the runs differ in, apart from the seed
    reference: str = ""  # name of the group
    groups: Sequence[GroupParity] = ()
    reason: str = ""  # why there are no groups


def is_seed(path: str) -> bool:
    """Return whether a setting is called seed."""
    return path.rpartition(".")[2] == "seed"


def usual_metric(compared: Comparison) -> str:
    """Return the first metric of the runs, or the loss."""
    return next((name for name in compared.names if name not in LABELS), "loss")


def direction(difference: float, is_low: bool | None) -> Conclusion:
    """Return whether a difference is better or worse; lower or higher if that is not known."""
    if is_low is None:
        return "lower" if difference < 0 else "higher"
    return "better" if is_low == (difference < 0) else "worse"


def shares_seeds(compared: Comparison) -> bool:
    """Return whether at least two seeds are each of several runs, which differ in a setting."""
    values = _values(compared)
    own = values.get(_seed_setting(values), {}).values()
    seeds = Counter(repr(seed) for seed in own if seed is not MISSING and seed is not None)
    return sum(count > 1 for count in seeds.values()) > 1 and bool(group_settings(compared))


def group_settings(compared: Comparison) -> list[str]:
    """Return the settings that groups of the runs can differ in."""
    seed = _seed_setting(_values(compared))
    return _choices(path for path, _ in compared.differences if path != seed)


def parity_of(
    compared: Comparison, metric: str = "", margin: float | None = None, group: str = ""
) -> Parity:
    """Compare the runs' last values of a metric, paired by seed.

    group: a setting that differs; by default the precision, else the only one. Raises Invalid.
    """
    metric = metric or usual_metric(compared)
    if metric not in compared.names and compared.is_over:
        allowed = ", ".join(compared.names[:10])
        raise Invalid({"metric": f"no run has {metric[:100]!r}; allowed: {allowed}"})
    settings = group_settings(compared)
    if group and group not in settings:
        allowed = ", ".join(settings[:10]) or "none, since no setting differs"
        raise Invalid({"group": f"no difference in {group[:100]!r}; allowed: {allowed}"})
    setting = group or (PRECISION if PRECISION in settings else "".join(settings[:1]))
    values = _values(compared)
    seed = _seed_setting(values)
    found = Parity(metric, margin, compared.is_low.get(metric), setting, seed, settings)
    if reason := _why_not(found, is_chosen=bool(group)):
        return replace(found, reason=reason)
    members: dict[str, list[Column]] = {}
    for column in compared.columns:
        members.setdefault(_group_name(values, setting, column.run.id), []).append(column)
    found = replace(found, reference="fp32" if "fp32" in members else next(iter(members)))
    if len(members) == 1:
        return replace(found, reason=f"all runs are of the group {found.reference}")
    own = {seed, *(OF_MIX if setting == PRECISION else (setting,))}
    others = {path: values[path] for path, _ in compared.differences if path not in own}
    base = _by_seed(members.pop(found.reference), values[seed])
    results = [
        _group(found, name, _by_seed(columns, values[seed]), base, others, is_chosen=bool(group))
        for name, columns in members.items()
    ]
    return replace(found, groups=results)


_Settings = Mapping[str, Mapping[int, Any]]  # values by path and run id
_BySeed = dict[str, list[Column]]


def _values(compared: Comparison) -> _Settings:
    return {path: dict(zip(compared.ids, row, strict=True)) for path, row in compared.settings}


def _seed_setting(values: _Settings) -> str:
    """Return the path of the seed; empty if there is none, or no standard one among several."""
    paths = [path for path in values if is_seed(path)]
    return SEED if SEED in paths else paths[0] if len(paths) == 1 else ""


def _choices(paths: Iterable[str]) -> list[str]:
    """Return settings that groups can differ in, of which the precision has several paths."""
    return list(dict.fromkeys(PRECISION if path in OF_PRECISION else path for path in paths))


def _why_not(found: Parity, *, is_chosen: bool) -> str:
    if not found.seed:
        return f"the runs have no setting {SEED}, and not exactly one that is called seed"
    if not found.settings:
        return "the runs differ in no setting but the seed"
    if len(found.settings) > 1 and not is_chosen and found.setting != PRECISION:
        return f"the runs differ in {few(found.settings)}: choose the one to compare"
    return ""


def _group_name(values: _Settings, setting: str, run_id: int) -> str:
    value = values[setting][run_id]
    if setting != PRECISION:
        return "not set" if value is MISSING else formats.value(value)
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


def _differs(row: Mapping[int, Any]) -> bool:
    return len({repr(value) for value in row.values()}) > 1


def _by_seed(columns: Sequence[Column], seeds: Mapping[int, Any]) -> _BySeed:
    runs: _BySeed = {}
    for column in columns:
        if (seed := seeds[column.run.id]) is not MISSING and seed is not None:
            runs.setdefault(formats.value(seed), []).append(column)
    return runs


def _group(
    found: Parity, name: str, mine: _BySeed, base: _BySeed, others: _Settings, *, is_chosen: bool
) -> GroupParity:
    """Compare a group with the reference, or state why it cannot be compared.

    No pair is left out for its result: runs that failed may be the worst ones.
    """
    seeds = [seed for seed in base if seed in mine]
    runs = [(mine[seed][0], base[seed][0]) for seed in seeds]
    pairs = [
        Pair(seed, a.run.id, b.run.id, _value(a, found.metric), _value(b, found.metric))
        for seed, (a, b) in zip(seeds, runs, strict=True)
    ]
    also_differ = _also_differing(runs, others)
    both = [column for pair in runs for column in pair]
    unfinished = [column for column in both if column.run.status != Status.FINISHED]
    unmeasured = [column for column in both if not math.isfinite(_value(column, found.metric))]
    repeated = [seed for seed in seeds if len(mine[seed]) + len(base[seed]) > 2]
    reason = ""
    if not seeds:
        reason = f"no run of {name} has the seed of a run of {found.reference}"
    elif repeated:
        reason = f"a group has several runs of seed {few(repeated)}; remove all but one"
    elif unfinished:
        reason = f"not finished: {_named(unfinished)}"
    elif unmeasured:
        reason = f"no finite {found.metric}: {_named(unmeasured)}"
    elif also_differ and not is_chosen:
        reason = f"runs of a pair also differ in {few(also_differ)}"
    result = (
        PairedTest("unknown", len(pairs), reason)
        if reason
        else compare_pairs(
            [pair.value for pair in pairs], [pair.reference_value for pair in pairs], found.margin
        )
    )
    return GroupParity(name, _conclusion(result, found.is_low), pairs, result, also_differ)


def _value(column: Column, metric: str) -> float:
    """Return a run's last value; NaN if it has none."""
    figure = column.figures.get(metric)
    return math.nan if figure is None or figure.value is None else figure.value


def _also_differing(runs: Sequence[tuple[Column, Column]], others: _Settings) -> list[str]:
    """Return in what else the runs of a pair differ."""
    differing = _choices(
        path
        for path, row in others.items()
        if any(repr(row[a.run.id]) != repr(row[b.run.id]) for a, b in runs)
    )
    if any(a.run.own_steps != b.run.own_steps for a, b in runs):
        differing.append("the number of their steps")
    if any((a.run.parent_step is None) != (b.run.parent_step is None) for a, b in runs):
        differing.append("whether they continue a checkpoint")
    return differing


def _conclusion(result: PairedTest, is_low: bool | None) -> Conclusion:
    is_directed = result.decision in ("lower", "higher")
    return direction(result.difference or 0.0, is_low) if is_directed else result.decision


def _named(columns: Sequence[Column]) -> str:
    return few([f"run {column.run.id} ({column.run.status})" for column in columns])


def few(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(name[:100] for name in names[:MOST_NAMED]) + more
