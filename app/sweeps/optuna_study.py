"""Optuna: suggests the points of a sweep, and decides which trials are pruned.

A study is rebuilt in memory from the rows of the trials each time: no state is lost with a process,
and two servers decide alike. Optuna is imported on first use, which takes half a second.
"""

import math
import warnings
from collections.abc import Sequence
from itertools import accumulate
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from app.sweeps.search_space import (
    CMAES,
    INTEGERS,
    LOGNORMAL,
    LOGUNIFORM,
    NORMALS,
    QMC,
    TPE,
    Space,
    is_active,
)
from db.sweeps.sweeps import COMPLETE, HYPERBAND, MAXIMIZE, OPEN
from db.tables import Sweep, Trial
from halfstep.telemetry.plain_json import JsonObject

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

#: Significant digits of a drawn number, for readability.
DIGITS = 6
#: Distance of a quantile from 0 and 1, where a normal distribution has no number.
SMALLEST_QUANTILE = 1e-9


# ---- Points ----------------------------------------------------------------------------------


def suggest(space: Space, kind: str, goal: str, seed: int, trials: Sequence[Trial]) -> JsonObject:
    """Return the next point of a sweep, which depends only on its trials, in order."""
    _quieten()
    study = _study(goal, sampler=_sampler(kind, (seed + len(trials) + 1) % 2**32, seed % 2**32))
    if kind == CMAES:
        for trial in trials:
            _repeat(study, space, trial)
    elif kind == QMC:
        _skip(study, space, len(trials))
    elif kind == TPE:
        study.add_trials([_frozen(trial, space) for trial in trials])
    return _point(study.ask(), space)


def _sampler(kind: str, seed: int, seed_of_sweep: int) -> "optuna.samplers.BaseSampler":
    """Return the sampler of a kind. seed: of the next point, whatever was drawn before."""
    from optuna import samplers

    if kind == TPE:
        # constant_liar: open trials count as bad, to avoid similar concurrent points.
        return samplers.TPESampler(seed=seed, constant_liar=True)
    random = samplers.RandomSampler(seed=seed)
    # Of settings that the others cannot draw: choices, and those with a condition.
    options: Any = {"independent_sampler": random, "warn_independent_sampling": False}
    if kind == CMAES:
        return samplers.CmaEsSampler(seed=seed_of_sweep, **options)
    if kind == QMC:
        options["warn_asynchronous_seeding"] = False
        return samplers.QMCSampler(seed=seed_of_sweep, scramble=True, **options)
    return random


def _quieten() -> None:
    """Silence Optuna's log and that it calls QMCSampler and PatientPruner experimental."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


def _study(goal: str, **options: Any) -> "optuna.Study":
    from optuna import create_study

    return create_study(direction="maximize" if goal == MAXIMIZE else "minimize", **options)


def _frozen(trial: Trial, space: Space) -> "optuna.trial.FrozenTrial":
    from optuna.trial import TrialState, create_trial

    states = {COMPLETE: TrialState.COMPLETE, OPEN: TrialState.RUNNING}
    tried = {path: search for path, search in space.items() if path in trial.params}
    return create_trial(
        state=states.get(trial.state, TrialState.FAIL),
        value=trial.value if trial.state == COMPLETE else None,
        params={path: _encode(trial.params[path], search) for path, search in tried.items()},
        distributions={path: _distribution(search) for path, search in tried.items()},
    )


def _repeat(study: "optuna.Study", space: Space, trial: Trial) -> None:
    """Let the sampler draw a trial again, which CMA-ES needs for its state, with its own point."""
    study.enqueue_trial(_frozen(trial, space).params)
    asked = study.ask()
    frozen, sampler = study.get_trials(deepcopy=False)[-1], study.sampler
    sampler.sample_relative(study, frozen, sampler.infer_relative_search_space(study, frozen))
    _point(asked, space)
    if trial.state == COMPLETE:
        study.tell(asked, trial.value)


def _skip(study: "optuna.Study", space: Space, count: int) -> None:
    """Skip the first points of a sequence, whose settings are those of a first, complete trial."""
    from optuna.trial import create_trial

    distributions = {
        path: _distribution(search) for path, search in space.items() if "when" not in search
    }
    params = {path: getattr(distribution, "low", 0) for path, distribution in distributions.items()}
    study.add_trial(create_trial(value=0.0, params=params, distributions=distributions))
    if count:
        study.ask(distributions)  # the first point: it begins the sequence, whose position we set
        storage, number = study._storage, study._study_id
        [key] = [key for key in storage.get_study_system_attrs(number) if key.startswith("qmc:")]
        storage.set_study_system_attr(number, key, count - 1)


def _point(trial: "optuna.Trial", space: Space) -> JsonObject:
    point: JsonObject = {}
    for path, search in space.items():
        if not is_active(search, point):
            continue
        point[path] = _decode(_suggest(trial, path, _distribution(search)), search)
    return point


def _suggest(
    trial: "optuna.Trial", path: str, distribution: "BaseDistribution"
) -> float | str | bool | None:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    match distribution:
        case CategoricalDistribution(choices=choices):
            return trial.suggest_categorical(path, choices)
        case IntDistribution(low=lowest, high=highest):
            return trial.suggest_int(path, lowest, highest)
        case FloatDistribution(low=low, high=high, log=log):
            return trial.suggest_float(path, low, high, log=log)
    raise AssertionError(distribution)


def _distribution(search: JsonObject) -> "BaseDistribution":
    """Return Optuna's distribution: of what it lacks the quantile, from 0 to 1."""
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if "probabilities" in search or search.get("distribution") in NORMALS:
        return FloatDistribution(0.0, 1.0)
    if "values" in search:
        # By index: for Optuna, as for Python, 1 and true are equal.
        return CategoricalDistribution(range(len(search["values"])))
    if search["distribution"] == INTEGERS:
        return IntDistribution(search["low"], search["high"])
    return FloatDistribution(
        search["low"], search["high"], log=search["distribution"] == LOGUNIFORM
    )


def _encode(value: Any, search: JsonObject) -> Any:
    """Return the value that Optuna has for a setting's."""
    if "values" in search:
        indexes = (i for i, other in enumerate(search["values"]) if other == value)
        index = next(i for i in indexes if type(search["values"][i]) is type(value))
        if "probabilities" not in search:
            return index
        below = sum(search["probabilities"][:index])
        return below + search["probabilities"][index] / 2
    if search["distribution"] in NORMALS:
        number = math.log(value) if search["distribution"] == LOGNORMAL else value
        return _inside(NormalDist(search["mean"], search["std"]).cdf(number))
    return min(max(value, search["low"]), search["high"])


def _decode(value: Any, search: JsonObject) -> Any:
    """Return the setting's value for Optuna's, rounded for reading."""
    if "probabilities" in search:
        ends = accumulate(search["probabilities"])
        likely = (i for i, end in enumerate(ends) if value < end)
        return search["values"][next(likely, len(search["values"]) - 1)]
    if "values" in search:
        return search["values"][value]
    if search["distribution"] in NORMALS:
        value = NormalDist(search["mean"], search["std"]).inv_cdf(_inside(value))
        value = math.exp(value) if search["distribution"] == LOGNORMAL else value
    if step := search.get("step"):
        value = round(value / step) * step
    rounded = value if isinstance(value, int) else float(f"{value:.{DIGITS}g}")
    if "low" not in search:
        return rounded
    return type(rounded)(_encode(rounded, search))  # within the bounds


def _inside(quantile: float) -> float:
    return min(max(quantile, SMALLEST_QUANTILE), 1 - SMALLEST_QUANTILE)


# ---- Pruning ---------------------------------------------------------------------------------


def weak_trials(sweep: Sweep, trials: Sequence[Trial], since: int) -> dict[int, JsonObject]:
    """Return the trials to prune by number, each with the report that decided it.

    trials: all of the sweep, in order: the number of a trial selects its bracket of Hyperband.
    since: the turn before the new reports; what was judged before is not judged again.
    """
    _quieten()
    study = _study(
        sweep.goal,
        study_name=f"sweep {sweep.id}",  # which selects brackets, too
        pruner=_pruner(sweep.pruner or {}),
        sampler=_sampler("", 0, 0),  # nothing is drawn
    )
    asked = {trial.number: study.ask() for trial in trials}
    reports = sorted(
        ((report["turn"], trial.number, report) for trial in trials for report in trial.reports),
        key=lambda row: row[0],
    )

    newest = {number: report for turn, number, report in reports if turn > since}
    keeps_rungs = (sweep.pruner or {}).get("kind") == HYPERBAND  # in a trial that it judges

    def is_weak(number: int, report: JsonObject) -> bool:
        asked[number].report(report["value"], report["rung"])
        is_judged = keeps_rungs or report is newest.get(number)
        return is_judged and asked[number].should_prune()

    for turn, number, report in reports:
        if turn <= since:
            is_weak(number, report)
    for trial in trials:
        if trial.state == COMPLETE:
            study.tell(asked[trial.number], trial.value)
    weak: dict[int, JsonObject] = {}
    for turn, number, report in reports:
        if turn > since and is_weak(number, report):
            weak.setdefault(number, report)
    return weak


def _pruner(chosen: JsonObject) -> "optuna.pruners.BasePruner":
    from optuna import pruners

    first, factor = chosen["first"], chosen["factor"]
    if chosen["kind"] == "median":
        return pruners.MedianPruner()
    if chosen["kind"] == "patient":
        return pruners.PatientPruner(None, patience=chosen["patience"])
    if chosen["last"] is None:
        return pruners.SuccessiveHalvingPruner(min_resource=first, reduction_factor=factor)
    return pruners.HyperbandPruner(first, chosen["last"], factor)
