"""Conditions of alert rules, with the texts of their alerts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from db.health.input_bound import DataWait
from db.runs.outcomes import SWEEP, RunOutcome, run_outcome
from db.tables import ACTIVE, ENDED, TRAIN, AlertRule, Run, Status
from halfstep.number_formats import number, percent
from halfstep.number_formats import scale as scale_text
from halfstep.telemetry.scaling_health import ScalingHealth

#: Number of latest steps in which skips, losses and spikes count.
RECENT_STEPS = 1000
ERROR_CHARACTERS = 200
#: Continue a run's name; halfstep/run_labels.py has the labels.
HEALTH_WORDS = {
    "oscillating": "has frequent skips",
    "collapsing": "has a collapsing loss scale",
    "dead": "has no updates",
}


@dataclass(frozen=True)
class Facts:
    """Facts about a run for conditions; only those that a rule needs are read."""

    run: Run
    moment: float
    applied: int | None = None  # steps
    health: ScalingHealth | None = None
    skips_in_a_row: int = 0  # most in the latest steps, without the search for the first scale
    nonfinite_step: int | None = None  # first of the latest steps with a non-finite loss
    lost_from: int | None = None  # of a finished run: no loss from this step on was finite
    spike_step: int | None = None  # latest, if recent
    progress_at: float | None = None  # time of its last step or change of status
    data_wait: DataWait | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)


class Condition(NamedTuple):
    """A condition of alert rules."""

    label: str  # continues "when it"
    describe: Callable[[AlertRule, Facts], str | None]  # continues the run's name; None: false
    value: str = ""  # meaning of the rule's number, empty if it has none
    needs: frozenset[str] = frozenset()  # names of the facts to read
    has_metric: bool = False
    has_cause: bool = False  # findings may name a cause


def describe(rule: AlertRule, facts: Facts) -> str | None:
    """Describe how a rule's condition is true for a run; None if it is not.

    It is never true for a run that ended before the rule was created.
    """
    ended_at = facts.run.ended_at
    if facts.run.status in ENDED and ended_at is not None and ended_at < rule.created_at:
        return None
    return CONDITIONS[rule.condition].describe(rule, facts)


def _status(*statuses: Status) -> Callable[[AlertRule, Facts], str | None]:
    def text(_rule: AlertRule, facts: Facts) -> str | None:
        run = facts.run
        if run.status not in statuses:
            return None
        if run.status in (Status.PAUSED, Status.UNREACHABLE, Status.CANCELLED):
            by = "was pruned by its sweep" if run.failure_kind == SWEEP else "was cancelled"
            if run.status == Status.UNREACHABLE:
                return "has lost contact with its worker"
            return f"is {run.status}" if run.status != Status.CANCELLED else by
        if run.status == Status.FAILED and run.error:
            reason = run.error.strip().splitlines()[-1:] or [""]  # the message of a traceback
            return f"failed: {reason[0][:ERROR_CHARACTERS].rstrip('.')}"  # the text ends with one
        return str(run.status)

    return text


def _ending(expected: RunOutcome, text: str) -> Callable[[AlertRule, Facts], str | None]:
    def text_if_ended(_rule: AlertRule, facts: Facts) -> str | None:
        return text if run_outcome(facts.run, facts.applied or 0) == expected else None

    return text_if_ended


def _describe_divergence(rule: AlertRule, facts: Facts) -> str | None:
    text = _ending("diverged", "finished, but diverged: its loss is not finite")(rule, facts)
    if text is None or facts.lost_from is None:
        return text
    return f"{text} from step {facts.lost_from:,} on"


def _health(*words: str) -> Callable[[AlertRule, Facts], str | None]:
    def text(_rule: AlertRule, facts: Facts) -> str | None:
        health = facts.health
        if health is None or health.word not in words:
            return None
        reason = health.reason[:1].lower() + health.reason[1:].rstrip(".")
        return f"{HEALTH_WORDS[health.word]}: {reason}"

    return text


def _scale_below(rule: AlertRule, facts: Facts) -> str | None:
    scale = facts.run.scale
    if facts.health is None or scale is None or scale >= _value(rule):
        return None
    return f"has the loss scale {scale_text(scale)}, below {scale_text(_value(rule))}"


def _skips(rule: AlertRule, facts: Facts) -> str | None:
    if facts.skips_in_a_row < _value(rule):
        return None
    return f"skipped {facts.skips_in_a_row:,} steps in a row"


def _nonfinite(_rule: AlertRule, facts: Facts) -> str | None:
    if facts.nonfinite_step is None:
        return None
    before = facts.nonfinite_step == facts.run.step - RECENT_STEPS + 1 > 1
    at = f"{facts.nonfinite_step:,}{' or before' if before else ''}"
    return f"had a loss that is not finite at step {at}"


def _spike(_rule: AlertRule, facts: Facts) -> str | None:
    return None if facts.spike_step is None else f"had a loss spike at step {facts.spike_step:,}"


def _no_progress(rule: AlertRule, facts: Facts) -> str | None:
    status = facts.run.status
    trains = facts.run.task == TRAIN and status in ACTIVE and status != Status.UNREACHABLE
    if not trains or facts.progress_at is None:
        return None
    minutes = (facts.moment - facts.progress_at) / 60
    return f"made no step for {number(_value(rule))} minutes" if minutes >= _value(rule) else None


def _starving(_rule: AlertRule, facts: Facts) -> str | None:
    wait = facts.data_wait
    if facts.run.status != Status.RUNNING or wait is None or not wait.is_real:
        return None
    return f"is input-bound: it waits for data for {percent(wait.share)} of its time"


def _compare(sign: int, *, of_metric: bool = False) -> Callable[[AlertRule, Facts], str | None]:
    def text(rule: AlertRule, facts: Facts) -> str | None:
        latest = facts.metrics.get(rule.metric) if of_metric else facts.run.loss
        if latest is None or not sign * latest > sign * _value(rule):
            return None
        name, side = rule.metric if of_metric else "the loss", "above" if sign > 0 else "below"
        return f"has {name} at {number(latest)}, {side} {number(_value(rule))}"

    return text


def _value(rule: AlertRule) -> float:
    return rule.value or 0.0


_HEALTH = frozenset({"health"})
#: Conditions by name, in the order of the page.
CONDITIONS: dict[str, Condition] = {
    "ended": Condition("ends (any reason)", _status(*ENDED)),
    "finished": Condition("finishes", _status(Status.FINISHED)),
    "failed": Condition("fails", _status(Status.FAILED)),
    "cancelled": Condition("is cancelled", _status(Status.CANCELLED)),
    "paused": Condition("is paused", _status(Status.PAUSED)),
    "unreachable": Condition("loses contact with its worker", _status(Status.UNREACHABLE)),
    "diverged": Condition(
        "diverges (its last loss is not finite)",
        _describe_divergence,
        needs=frozenset({"applied", "lost_from"}),
        has_cause=True,
    ),
    "no_updates": Condition(
        "finishes with no updates (every step was skipped)",
        _ending("no_updates", "finished with no updates: every step was skipped"),
        needs=frozenset({"applied"}),
        has_cause=True,
    ),
    "stopped": Condition(
        "is stopped by a rule of its configuration",
        _ending("stopped", "was stopped by a rule of its configuration"),
    ),
    "collapsing": Condition(
        *(
            "has a collapsing loss scale, or stops updating the weights",
            _health("collapsing", "dead"),
        ),
        needs=_HEALTH,
        has_cause=True,
    ),
    "dead": Condition("stops updating the weights", _health("dead"), needs=_HEALTH, has_cause=True),
    "oscillating": Condition(
        *("has frequent skips", _health("oscillating")),
        needs=_HEALTH,
        has_cause=True,
    ),
    "scale_below": Condition("has a loss scale below", _scale_below, "scale", _HEALTH),
    "skips_in_a_row": Condition(
        *("skips a number of steps in a row", _skips, "steps"),
        needs=frozenset({"skips_in_a_row", "health"}),
        has_cause=True,
    ),
    "nonfinite_loss": Condition(
        *("has a loss that is not finite", _nonfinite),
        needs=frozenset({"nonfinite_step"}),
        has_cause=True,
    ),
    "loss_spike": Condition("has a loss spike", _spike, needs=frozenset({"spike_step"})),
    "no_progress": Condition(
        "makes no step for some minutes", _no_progress, "minutes", frozenset({"progress_at"})
    ),
    "starving": Condition("is input-bound", _starving, needs=frozenset({"data_wait"})),
    "loss_above": Condition("has a loss above", _compare(1), "loss"),
    "loss_below": Condition("has a loss below", _compare(-1), "loss"),
    "metric_above": Condition(
        *("has a metric above", _compare(1, of_metric=True), "value", frozenset({"metrics"})),
        has_metric=True,
    ),
    "metric_below": Condition(
        *("has a metric below", _compare(-1, of_metric=True), "value", frozenset({"metrics"})),
        has_metric=True,
    ),
}
#: A condition that may become true without any change of the run.
TIMED = "no_progress"
