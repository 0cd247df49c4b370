"""Optuna: `study.optimize(halfstep.optuna.watch(objective), n_trials=20)`.

Steps are observed through torch's own scaler and optimizers, as in any script. This wrapper begins
a run for each trial, records the trial's parameters, state and value, and finishes the run.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import optuna

from halfstep.session import active_run, run_start
from halfstep.session.stderr import say

Objective = Callable[[optuna.Trial], Any]

_is_training = threading.Lock()  # a process has one run at a time


def watch(objective: Objective, **named: object) -> Objective:
    """Wrap an objective so that each trial is a run. Takes the arguments of halfstep.watch.

    Calls of halfstep.watch in the objective add their modules to the trial's run.
    """

    @functools.wraps(objective)
    def wrapper(trial: optuna.Trial) -> Any:
        if not _is_training.acquire(blocking=False):
            why = "another trial is running in this process; use n_jobs=1, or several processes"
            say(f"trial {trial.number} is not watched: {why}")
            return objective(trial)
        try:
            return _watch_trial(objective, trial, named)
        finally:
            _is_training.release()

    return wrapper


def _watch_trial(objective: Objective, trial: optuna.Trial, named: dict[str, Any]) -> Any:
    if active_run.active is not None:
        say(
            f"trial {trial.number} is recorded in the run that is already active; call finish() "
            "before the study"
        )
        return objective(trial)
    study = trial.study.study_name
    labels = {"name": f"{study}-{trial.number}", "tags": [study]}
    run = run_start.watch(**labels | named)
    config = run.config

    def configure(state: str) -> None:
        about = {"study": study, "trial": trial.number, "state": state}
        run.configure({**config, **trial.params, "optuna": about})

    try:
        result = objective(trial)
    except optuna.TrialPruned:
        configure("pruned")
        run.finish()
        raise
    except BaseException as error:
        configure("fail")
        run.__exit__(type(error), error, error.__traceback__)
        raise
    configure("complete")
    run.log(_values(result, trial.study.metric_names))
    run.finish()
    return result


def _values(result: object, names: list[str] | None) -> dict[str, Any]:
    """Return the objective's values by name: "value", or "value_0" and so on."""
    if not isinstance(result, list | tuple):
        return {names[0] if names else "value": result}
    return dict(zip(names or [f"value_{i}" for i in range(len(result))], result, strict=False))
