"""TPE suggestions by Optuna (extra `sweeps`).

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

NEEDED = "tpe and hyperband need optuna, which is not installed on the server: "
NEEDED += "pip install 'halfstep-service[sweeps]'"


def is_installed() -> bool:
    """Return whether Optuna is installed."""
    return find_spec("optuna") is not None


def suggested(
    space: Space, goal: str, seed: int, number: int, trials: Sequence[Trial]
) -> dict[str, Any]:
    """Return the point of trial `number`, based on the trials before.

    Deterministic: two concurrent servers suggest the same point.
    """
    import optuna  # deferred: takes half a second

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {path: _distribution(search) for path, search in space.items()}
    # constant_liar: open trials count as bad, to avoid similar concurrent points.
    sampler = optuna.samplers.TPESampler(seed=(seed + number) % 2**32, constant_liar=True)
    directions = optuna.study.StudyDirection
    direction = directions.MAXIMIZE if goal == MAXIMISE else directions.MINIMIZE
    study = optuna.create_study(direction=direction, sampler=sampler)
    study.add_trials([_frozen(trial, space, distributions) for trial in trials])
    params = study.ask(distributions).params
    return {path: _of_optuna(params[path], search) for path, search in space.items()}


def _frozen(
    trial: Trial, space: Space, distributions: "dict[str, BaseDistribution]"
) -> "FrozenTrial":
    from optuna.trial import TrialState, create_trial

    states = {COMPLETE: TrialState.COMPLETE, OPEN: TrialState.RUNNING}
    return create_trial(
        state=states.get(trial.state, TrialState.FAIL),
        value=trial.value,
        params={path: _to_optuna(trial.params[path], search) for path, search in space.items()},
        distributions=distributions,
    )


def _distribution(search: dict[str, Any]) -> "BaseDistribution":
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if "values" in search:
        # By index: for Optuna, as for Python, 1 and true are equal.
        return CategoricalDistribution(range(len(search["values"])))
    if search["distribution"] == INTEGERS:
        return IntDistribution(search["low"], search["high"])
    return FloatDistribution(
        search["low"], search["high"], log=search["distribution"] == LOGUNIFORM
    )


def _to_optuna(value: Any, search: dict[str, Any]) -> Any:
    if "values" not in search:
        return value
    indexes = (i for i, other in enumerate(search["values"]) if other == value)
    return next(i for i in indexes if type(search["values"][i]) is type(value))


def _of_optuna(value: Any, search: dict[str, Any]) -> Any:
    if "values" in search:
        return search["values"][value]
    return value if search["distribution"] == INTEGERS else rounded(value, search)
