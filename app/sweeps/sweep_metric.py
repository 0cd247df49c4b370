"""Metric by which a sweep compares its runs: whether runs log it, its goal, and a later choice."""

from typing import Annotated

from pydantic import AfterValidator, Field
from sqlalchemy.orm import Session

from app.http.parameters import flaw
from app.submission.command_lines import default_name
from app.telemetry import metric_direction
from db.errors import Conflict, Invalid
from db.sweeps import sweeps
from db.sweeps.sweeps import MAXIMIZE, MINIMIZE
from db.tables import Sweep
from halfstep.suggestions import did_you_mean
from halfstep.telemetry.plain_json import JsonObject

METRIC_CHARACTERS = 200
Metric = Annotated[str, Field(description="Metric whose last value counts, or loss")]
Goal = Annotated[
    str,
    AfterValidator(lambda goal: goal.replace("mise", "mize")),
    Field(description="minimize or maximize; empty: derived from the metric's name"),
]
#: Names of metrics in a warning.
LISTED = 12


def check_metric(metric: str, goal: str) -> dict[str, str]:
    """Return what is wrong with a metric's name and a goal, by field."""
    errors = {}
    if not metric or len(metric) > METRIC_CHARACTERS:
        text = f"{len(metric)} characters; allowed: 1 to {METRIC_CHARACTERS}"
        errors["metric"] = text
    elif wrong := flaw(metric):
        errors["metric"] = wrong
    if goal not in ("", MINIMIZE, MAXIMIZE):
        errors["goal"] = f"{goal[:100]!r} is not valid; allowed: {MINIMIZE} or {MAXIMIZE}"
    return errors


def goal_of(metric: str, goal: str, config: JsonObject) -> tuple[str, dict[str, str]]:
    """Return the goal, by default derived from the metric's name, and errors."""
    if goal:
        return goal, {}
    is_low = metric_direction.lowest(metric, [config])
    if is_low is None:
        text = f"it is unknown whether a lower {metric[:100]!r} is better"
        return "", {"goal": f"{text}; allowed: {MINIMIZE} or {MAXIMIZE}"}
    return MINIMIZE if is_low else MAXIMIZE, {}


def find_warning(session: Session, metric: str, recipe: str, line: str, own: list[str]) -> str:
    """Return a warning if runs of a sweep, or earlier ones of its recipe or line, lack its metric.

    own: metrics of the sweep's own runs.  Empty without such runs.
    """
    known = own or sweeps.earlier_metrics(session, recipe, line)
    if not known or metric in known:
        return ""
    runs = "this sweep" if own else recipe or default_name(line)
    more = f", … ({len(known)})" if len(known) > LISTED else ""
    meant = did_you_mean(metric, known)
    return (
        f"No recent run of {runs} has logged {metric[:METRIC_CHARACTERS]}"
        f"{'; ' + meant if meant else '. '}Logged: {', '.join(known[:LISTED])}{more}."
    )


def change(session: Session, sweep: Sweep, metric: str, goal: str) -> None:
    """Compare a sweep's runs by another metric. sweep: locked.  Raises Invalid, Conflict."""
    errors = check_metric(metric, goal)
    goal, unknown = goal_of(metric, goal, sweep.config)
    if errors or unknown:
        raise Invalid(unknown | errors)
    if sweep.pruner and sweeps.under_way(session, sweep):
        text = f"Sweep {sweep.id} ends weak runs by {sweep.metric}: first wait for its runs."
        raise Conflict(text)
    sweep.metric, sweep.goal = metric, goal
    sweeps.revalue(session, sweep)
