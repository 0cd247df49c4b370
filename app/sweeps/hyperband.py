"""Hyperband: pruning of weak trials of a sweep, to free their devices.

A trial reports after a 27th, a ninth and a third of its steps the first finite value of the metric
from there on: the best third of its bracket at that rung continues. Later brackets report later,
and the last one never, so that slow learners survive. Optuna's pruner decides; its study is rebuilt
in memory from the reports of the trials, in order, so no state is lost with a process.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy.orm import Session

from db.queue import run_control
from db.sweeps import sweeps
from db.sweeps.sweeps import MAXIMISE, RUNG_FACTOR, RUNGS_WHOLE
from db.tables import Run, Sweep, Trial
from halfstep.number_formats import number

#: Limit of runs: Optuna scans all trials at each report, which takes 0.1 s for 300.
MOST_RUNS = 300


def prune_weak(session: Session, sweep: Sweep) -> None:
    """Record the trials that reached a rung, and prune the weak ones.

    The caller must hold the lock of the sweep.
    """
    rows = sweeps.under_way(session, sweep)
    reporting = [trial for trial, run in rows if _report(session, sweep, trial, run)]
    if not reporting:
        return
    weak = weak_trials(sweep, sweeps.all_trials(session, sweep))
    for trial, run in rows:
        if trial.number in weak and trial.pruned_step is None:
            reason = f"pruned by sweep {sweep.id}: {_reason(sweep, weak[trial.number])}"
            trial.pruned_step = run.step if run_control.prune(session, run.id, reason) else None


def weak_trials(sweep: Sweep, trials: Sequence[Trial]) -> dict[int, dict[str, Any]]:
    """Return the pruned trials by number, each with the report that decided it.

    trials: all of the sweep, in order: the number of a trial selects its bracket.
    """
    import optuna  # deferred: takes half a second

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.HyperbandPruner(
        min_resource=1, max_resource=RUNGS_WHOLE, reduction_factor=RUNG_FACTOR
    )
    study = optuna.create_study(
        study_name=f"sweep {sweep.id}",
        direction="maximize" if sweep.goal == MAXIMISE else "minimize",
        pruner=pruner,
        sampler=optuna.samplers.RandomSampler(seed=0),  # nothing is drawn
    )
    optuna_trials = {trial.number: study.ask() for trial in trials}
    reports = [
        (report["turn"], trial.number, report) for trial in trials for report in trial.reports
    ]
    weak: dict[int, dict[str, Any]] = {}
    for _turn, index, report in sorted(reports, key=lambda row: row[0]):
        optuna_trials[index].report(report["value"], report["rung"])
        if optuna_trials[index].should_prune():
            weak.setdefault(index, report)
    return weak


def _report(session: Session, sweep: Sweep, trial: Trial, run: Run) -> bool:
    """Record a trial's value at each reached rung; return whether it reached one."""
    reports = len(trial.reports)
    while run.steps_total and trial.next_rung < RUNGS_WHOLE:
        step = -(-run.steps_total * trial.next_rung // RUNGS_WHOLE)
        value = sweeps.value_from(session, sweep.metric, run.id, step) if run.step >= step else None
        if value is None:
            break
        sweeps.report(session, sweep, trial, value)
    return len(trial.reports) > reports


def _reason(sweep: Sweep, report: dict[str, Any]) -> str:
    share = RUNGS_WHOLE // report["rung"]
    value = f"{sweep.metric} {number(report['value'])}"
    return f"after 1/{share} of its steps its {value} was not among the best third of its bracket"
