"""TPE by Optuna (extra `sweeps`).

The study is rebuilt in memory from the trials at each suggestion: no state is lost with a process.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from app.sweeps.search_space import INTEGERS, LOGUNIFORM, Space, rounded
from db.sweeps.sweeps import COMPLETE, MAXIMISE, OPEN
from db.tables import Trial

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

NEEDED = "tpe and hyperband need optuna, which the server lacks: "
NEEDED += "pip install 'halfstep-service[sweeps]'"


def is_installed() -> bool:
    """Return whether Optuna is installed."""
    return find_spec("optuna") is not None


def suggested(
    space: Space, goal: str, seed: int, number: int, trials: Sequence[Trial]
) -> dict[str, Any]:
    """Return the point of trial `number`, based on the trials before.

    Deterministic: two servers that run at once suggest the same point.
    """
    import optuna  # half a second, of whom it is asked alone

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {path: _distribution(each) for path, each in space.items()}
    # What is under way counts as if it were bad, lest the same be tried at once.
    sampler = optuna.samplers.TPESampler(seed=(seed + number) % 2**32, constant_liar=True)
    directions = optuna.study.StudyDirection
    direction = directions.MAXIMIZE if goal == MAXIMISE else directions.MINIMIZE
    study = optuna.create_study(direction=direction, sampler=sampler)
    study.add_trials([_told(trial, space, distributions) for trial in trials])
    found = study.ask(distributions).params
    return {path: _of_optuna(found[path], each) for path, each in space.items()}


def _told(
    trial: Trial, space: Space, distributions: "dict[str, BaseDistribution]"
) -> "FrozenTrial":
    from optuna.trial import TrialState, create_trial

    states = {COMPLETE: TrialState.COMPLETE, OPEN: TrialState.RUNNING}
    return create_trial(
        state=states.get(trial.state, TrialState.FAIL),
        value=trial.value,
        params={path: _to_optuna(trial.params[path], each) for path, each in space.items()},
        distributions=distributions,
    )


def _distribution(each: dict[str, Any]) -> "BaseDistribution":
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if "values" in each:
        # By place: to Optuna, as to Python, 1 and true are one value.
        return CategoricalDistribution(range(len(each["values"])))
    if each["distribution"] == INTEGERS:
        return IntDistribution(each["low"], each["high"])
    return FloatDistribution(each["low"], each["high"], log=each["distribution"] == LOGUNIFORM)


def _to_optuna(value: Any, each: dict[str, Any]) -> Any:
    if "values" not in each:
        return value
    places = (i for i, other in enumerate(each["values"]) if other == value)
    return next(i for i in places if type(each["values"][i]) is type(value))


def _of_optuna(value: Any, each: dict[str, Any]) -> Any:
    if "values" in each:
        return each["values"][value]
    return value if each["distribution"] == INTEGERS else rounded(value, each)
