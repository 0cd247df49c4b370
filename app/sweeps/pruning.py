"""Pruning of weak trials of a sweep, to free their devices and agents.

A trial reports the metric at its rungs: of a recipe by the share of its steps, in 27ths, since runs
of a sweep may differ in their steps; else by the number of values of the metric. Hyperband
multiplies the rung by its factor each time, the others report at multiples of the first, and from
the hundredth value on at most at each hundredth part of the values.
"""

from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field
from sqlalchemy.orm import Session

from app.http.parameters import Body
from app.sweeps import optuna_study
from db.queue import run_control
from db.sweeps import agent_claims, sweeps
from db.sweeps.sweeps import HYPERBAND, RUNGS_WHOLE
from db.tables import Run, Sweep, Trial
from halfstep.number_formats import number
from halfstep.telemetry.plain_json import JsonObject

#: Limit of runs: Optuna scans all trials at each report, which takes 0.1 s for 300.
MOST_RUNS = 300
MOST_RUNG = 10**9

Rung = Annotated[int, Field(ge=1, le=MOST_RUNG)]


class Pruner(Body):
    """Rule by which weak runs are ended early."""

    kind: Annotated[
        Literal["hyperband", "median", "patient"],
        Field(
            description="hyperband: not among the best of its bracket; median: worse than the "
            "median of the completed runs, from the sixth on; patient: no longer improving"
        ),
    ]
    first: Rung = 1
    """First check: of a recipe in 27ths of its steps, else after so many values of the metric"""
    factor: Annotated[int, Field(ge=2, le=100)] = 3
    """Of hyperband: one in so many continues"""
    last: Annotated[
        Rung | None,
        Field(
            description="Of hyperband: values of a whole run, from which it makes brackets; null: "
            "one bracket; of a recipe 27"
        ),
    ] = None
    patience: Annotated[int, Field(ge=0, le=1000)] = 3
    """Of patient: further checks without improvement"""


def to_stored(pruner: Pruner | None, *, is_recipe: bool) -> JsonObject | None:
    """Return a pruner as the sweep's row has it."""
    if pruner is None:
        return None
    return pruner.model_dump() | ({"last": RUNGS_WHOLE} if is_recipe else {})


def prune_weak(session: Session, sweep: Sweep) -> None:
    """Record the trials that reached a rung, and prune the weak ones.

    The caller must hold the lock of the sweep.
    """
    since, rows = sweep.revision, sweeps.under_way(session, sweep)
    reporting = [trial for trial, run in rows if _report(session, sweep, trial, run)]
    if not reporting:
        return
    weak = optuna_study.weak_trials(sweep, sweeps.all_trials(session, sweep), since)
    for trial, run in rows:
        if trial.number in weak and trial.pruned_step is None:
            reason = f"pruned by sweep {sweep.id}: {_reason(sweep, weak[trial.number])}"
            if sweep.is_for_agents:
                is_pruned = agent_claims.prune(session, trial, reason)
            else:
                is_pruned = run_control.prune(session, run.id, reason)
            trial.pruned_step = run.step if is_pruned else None


def _report(session: Session, sweep: Sweep, trial: Trial, run: Run) -> bool:
    """Record a trial's value at each reached rung; return whether it reached one."""
    reports = len(trial.reports)
    while sweep.recipe == "" or (run.steps_total and trial.next_rung < RUNGS_WHOLE):
        if sweep.recipe:
            step = -(-run.steps_total * trial.next_rung // RUNGS_WHOLE)
            is_there = run.step >= step
            value = sweeps.value_from(session, sweep.metric, run.id, step) if is_there else None
        else:
            value = sweeps.value_at(session, sweep.metric, run, trial.next_rung)
        if value is None:
            break
        sweeps.report(session, sweep, trial, value)
    return len(trial.reports) > reports


def _reason(sweep: Sweep, report: JsonObject) -> str:
    rung, pruner = report["rung"], sweep.pruner or {}
    after = f"{Fraction(rung, RUNGS_WHOLE)} of its steps" if sweep.recipe else f"{rung} values"
    text = f"after {after} its {sweep.metric} {number(report['value'])}"
    if pruner["kind"] == HYPERBAND:
        part = "third" if pruner["factor"] == 3 else f"1/{pruner['factor']}"
        return f"{text} was not among the best {part} of its bracket"
    if pruner["kind"] == "median":
        return f"{text} was worse than the median of the completed runs"
    return f"{text} had not improved for {pruner['patience']} checks"
