"""Conditions of alert rules, with the texts of their alerts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from db.health.input_bound import DataWait
from db.health.verdict import Verdict
from db.runs.outcomes import SWEEP, Ending, ending
from db.tables import ACTIVE, ENDED, AlertRule, Run, Status
from db.telemetry.scales import in_words

#: Skips, losses and spikes count while they are among so many of the latest steps.
RECENT_STEPS = 1000
ERROR_CHARACTERS = 200


@dataclass(frozen=True)
class Facts:
    """What conditions go by; of a run only what some rule asks for.

    applied: steps.  skips_in_a_row: the most among the latest steps, without the search for the
    first scale.  nonfinite_step: the first of the recent ones.  lost_from: of a finished run, the
    step from which on no loss was finite.  spike_step: the latest, if recent.  progress_at: when
    its last step, or its last change of status, was.
    """

    run: Run
    moment: float
    applied: int | None = None
    verdict: Verdict | None = None
    skips_in_a_row: int = 0
    nonfinite_step: int | None = None
    lost_from: int | None = None
    spike_step: int | None = None
    progress_at: float | None = None
    data_wait: DataWait | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)


class Condition(NamedTuple):
    """label: after "when it"; says: that it holds, after the run's name, or None.

    value: what a rule's number is, empty if it has none; needs: of the facts, those to be read.
    has_cause: a number that is not finite may be its cause, as the findings name it.
    """

    label: str
    says: Callable[[AlertRule, Facts], str | None]
    value: str = ""
    needs: frozenset[str] = frozenset()
    has_metric: bool = False
    has_cause: bool = False


def says(rule: AlertRule, facts: Facts) -> str | None:
    """Say that a rule's condition holds for a run, or None. A run that ended before the rule was
    made is none of its business.
    """
    ended_at = facts.run.ended_at
    if facts.run.status in ENDED and ended_at is not None and ended_at < rule.created_at:
        return None
    return CONDITIONS[rule.condition].says(rule, facts)


def _status(*wanted: Status) -> Callable[[AlertRule, Facts], str | None]:
    def words(_rule: AlertRule, facts: Facts) -> str | None:
        run = facts.run
        if run.status not in wanted:
            return None
        if run.status in (Status.PAUSED, Status.UNREACHABLE, Status.CANCELLED):
            words = "was given up by its sweep" if run.failure_kind == SWEEP else "was cancelled"
            return f"is {run.status}" if run.status != Status.CANCELLED else words
        if run.status == Status.FAILED and run.error:
            reason = run.error.strip().splitlines()[-1:] or [""]  # of a traceback the message
            return f"failed: {reason[0][:ERROR_CHARACTERS]}"
        return str(run.status)

    return words


def _ending(wanted: Ending, words: str) -> Callable[[AlertRule, Facts], str | None]:
    def says_so(_rule: AlertRule, facts: Facts) -> str | None:
        return words if ending(facts.run, facts.applied or 0) == wanted else None

    return says_so


def _diverged(rule: AlertRule, facts: Facts) -> str | None:
    words = _ending("diverged", "finished, but diverged: its loss is not finite")(rule, facts)
    if words is None or facts.lost_from is None:
        return words
    return f"{words} from step {facts.lost_from:,} on"


def _verdict(*wanted: str) -> Callable[[AlertRule, Facts], str | None]:
    def words(_rule: AlertRule, facts: Facts) -> str | None:
        found = facts.verdict
        if found is None or found.word not in wanted:
            return None
        return f"is {found.word}: {found.reason[0].lower()}{found.reason[1:].rstrip('.')}"

    return words


def _scale_below(rule: AlertRule, facts: Facts) -> str | None:
    scale = facts.run.scale
    if facts.verdict is None or scale is None or scale >= _value(rule):
        return None
    return f"has the loss scale {in_words(scale)}, below {in_words(_value(rule))}"


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
    trains = facts.run.status in ACTIVE and facts.run.status != Status.UNREACHABLE
    if not trains or facts.progress_at is None:
        return None
    minutes = (facts.moment - facts.progress_at) / 60
    return f"made no step for {_value(rule):g} minutes" if minutes >= _value(rule) else None


def _starving(_rule: AlertRule, facts: Facts) -> str | None:
    found = facts.data_wait
    if facts.run.status != Status.RUNNING or found is None or not found.is_real:
        return None
    return f"waits for its data for {found.share:.0%} of its time"


def _compared(sign: int, *, of_metric: bool = False) -> Callable[[AlertRule, Facts], str | None]:
    def words(rule: AlertRule, facts: Facts) -> str | None:
        number = facts.metrics.get(rule.metric) if of_metric else facts.run.loss
        if number is None or not sign * number > sign * _value(rule):
            return None
        name, side = rule.metric if of_metric else "the loss", "above" if sign > 0 else "below"
        return f"has {name} at {number:.6g}, {side} {_value(rule):g}"

    return words


def _value(rule: AlertRule) -> float:
    return rule.value or 0.0


_VERDICT = frozenset({"verdict"})
#: By the name that rules have; in the order of the page.
CONDITIONS: dict[str, Condition] = {
    "ended": Condition("ends, however", _status(*ENDED)),
    "finished": Condition("finishes", _status(Status.FINISHED)),
    "failed": Condition("fails", _status(Status.FAILED)),
    "cancelled": Condition("is cancelled", _status(Status.CANCELLED)),
    "paused": Condition("is paused", _status(Status.PAUSED)),
    "unreachable": Condition("cannot be reached", _status(Status.UNREACHABLE)),
    "diverged": Condition(
        "ends diverged: its last loss is not finite",
        _diverged,
        needs=frozenset({"applied", "lost_from"}),
        has_cause=True,
    ),
    "unapplied": Condition(
        "finishes with nothing applied",
        _ending("unapplied", "finished with every step skipped: nothing was applied"),
        needs=frozenset({"applied"}),
        has_cause=True,
    ),
    "stopped": Condition(
        "is stopped by a rule of its configuration",
        _ending("stopped", "was stopped by a rule of its configuration"),
    ),
    "collapsing": Condition(
        *("has a loss scale that collapses, or is dead", _verdict("collapsing", "dead")),
        needs=_VERDICT,
        has_cause=True,
    ),
    "dead": Condition("has a dead loss scale", _verdict("dead"), needs=_VERDICT, has_cause=True),
    "oscillating": Condition(
        *("has a loss scale that oscillates", _verdict("oscillating")),
        needs=_VERDICT,
        has_cause=True,
    ),
    "scale_below": Condition("has a loss scale below", _scale_below, "scale", _VERDICT),
    "skips_in_a_row": Condition(
        *("skips so many steps in a row", _skips, "steps"),
        needs=frozenset({"skips_in_a_row", "verdict"}),
        has_cause=True,
    ),
    "nonfinite_loss": Condition(
        *("has a loss that is not finite", _nonfinite),
        needs=frozenset({"nonfinite_step"}),
        has_cause=True,
    ),
    "loss_spike": Condition("has a loss spike", _spike, needs=frozenset({"spike_step"})),
    "no_progress": Condition(
        "makes no step for so many minutes", _no_progress, "minutes", frozenset({"progress_at"})
    ),
    "starving": Condition("waits for its data", _starving, needs=frozenset({"data_wait"})),
    "loss_above": Condition("has a loss above", _compared(1), "loss"),
    "loss_below": Condition("has a loss below", _compared(-1), "loss"),
    "metric_above": Condition(
        *("has a metric above", _compared(1, of_metric=True), "value", frozenset({"metrics"})),
        has_metric=True,
    ),
    "metric_below": Condition(
        *("has a metric below", _compared(-1, of_metric=True), "value", frozenset({"metrics"})),
        has_metric=True,
    ),
}
#: Those that come to hold while nothing changes.
TIMED = "no_progress"
