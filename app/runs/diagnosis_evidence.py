"""Evidence of a diagnosis: what the records of an ended run say, and when it happened."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from sqlalchemy import select
from sqlalchemy.orm import Session

from app.html.formats import scale, with_code
from db.files import checkpoints
from db.health import causes, findings
from db.tables import Run, ScalerEvent
from db.telemetry import series, step_rows
from db.telemetry.stored_events import StoredEvents
from halfstep.diagnosis.defect import Defect
from halfstep.diagnosis.statements import text_of
from halfstep.number_formats import count, number
from halfstep.telemetry.events import Replay

SKIPS_READ = 200


@dataclass(frozen=True)
class Moment:
    """A step of the timeline."""

    step: int
    label: str
    tone: str  # good, warn, bad or quiet


@dataclass(frozen=True)
class DiagnosisEvidence:
    """Rows of a table, and a timeline; what is not known is left out."""

    rows: Sequence[tuple[str, str | Markup]]
    moments: Sequence[Moment]


def diagnosis_evidence(session: Session, run: Run) -> DiagnosisEvidence:
    """Return the evidence of an ended run."""
    lost = causes.first_flagged_step(session, run.id, "nonfinite")
    is_below = run.scale is not None and run.scale < 1
    below = _first_event(session, run.id, ScalerEvent.scale_after < 1) if is_below else None
    skips = series.skips(session, run.id, most=SKIPS_READ) if run.skipped else []
    first = causes.first_flagged_step(session, run.id, "skipped") if run.skipped else None
    streak = _last_streak([skip.step for skip in skips], run, first)
    rows = [*_loss(session, run, lost), *_skips(run, skips, streak), *_scale(session, run)]
    rows += _replay(StoredEvents(session, run).first(Replay, most=SKIPS_READ))
    below_at = below.step if below else None
    return DiagnosisEvidence(rows, list(_moments(session, run, lost, below_at, first, streak)))


def _first_event(session: Session, run_id: int, condition: Any) -> ScalerEvent | None:
    query = select(ScalerEvent).where(ScalerEvent.run_id == run_id, condition)
    return session.scalars(query.order_by(ScalerEvent.step, ScalerEvent.id).limit(1)).first()


def _last_streak(steps: Sequence[int], run: Run, first_skip: int | None) -> int | None:
    """Return from which step on all were skipped; None if the last was not, or if unknown.

    steps: of the latest skips, newest first.
    """
    if first_skip is not None and run.skipped == run.step - first_skip + 1:
        return first_skip if first_skip < run.step else None
    first = run.step + 1
    for step in dict.fromkeys(steps):
        if step != first - 1:
            return first if first < run.step else None
        first = step
    return None  # it is longer than what was read


def _loss(session: Session, run: Run, lost: int | None) -> Iterator[tuple[str, str]]:
    if lost is None:
        return
    before = next(iter(step_rows.rows_at(session, run.id, [lost - 1])), None)
    known = f"{number(before.with_nan().loss)} at step {count(lost - 1)}, " if before else ""
    yield "Loss", f"{known}not finite at step {count(lost)}"


def _skips(run: Run, skips: Sequence[ScalerEvent], streak: int | None) -> Iterator[tuple[str, str]]:
    if not run.skipped:
        return
    text = f"{count(run.skipped)} of {count(run.own_steps)} steps"
    if streak is not None:
        text += f", each from step {count(streak)} on"
        if earlier := run.skipped - (run.step - streak + 1):
            text += f" and {count(earlier)} earlier"
    lost, latest = causes.lost_skips(skips[: findings.SKIPS_READ])
    if lost:
        text += f"; the loss was not finite in {count(lost)} of the last {count(latest)} skips"
    yield "Skipped", text


def _scale(session: Session, run: Run) -> Iterator[tuple[str, Markup]]:
    first = _first_event(session, run.id, ScalerEvent.scale_before > 0)
    if first is not None and run.scale is not None and run.scale < first.scale_before:
        text = Markup("from {} at step {} to {}")
        yield (
            "Loss scale",
            text.format(scale(first.scale_before), count(first.step), scale(run.scale)),
        )


def _replay(replays: Sequence[Replay]) -> Iterator[tuple[str, str | Markup]]:
    found = next((replay for replay in replays if replay.found), None)
    if found is None:
        return
    if isinstance(found.defect, Defect):
        yield "Replay", with_code(text_of(found.defect))
        return
    text = Markup("{}, {}, <code>{}</code>").format(
        found.module or "the loss", found.direction, found.operation
    )
    if found.largest_input is not None:
        text += f": largest input {number(found.largest_input)}"
    yield "Replay", text


def _moments(
    session: Session,
    run: Run,
    lost: int | None,
    below: int | None,
    first_skip: int | None,
    streak: int | None,
) -> Iterator[Moment]:
    is_one_streak = streak == first_skip
    known = [
        (lost, "loss not finite", "bad"),
        (streak, "skips begin" if is_one_streak else "every step skipped", "bad"),
        (below, "scale below 1", "warn"),
    ]
    trouble = [Moment(step, label, tone) for step, label, tone in known if step is not None]
    if not trouble:
        return
    saved = checkpoints.newest_step(session, run.id, before=min(moment.step for moment in trouble))
    if saved is not None:
        trouble.append(Moment(saved, "checkpoint", "good"))
    if first_skip is not None and not is_one_streak:
        trouble.append(Moment(first_skip, "first skip", "quiet"))
    yield from sorted(trouble, key=lambda moment: moment.step)
    yield Moment(run.step, "end", "quiet")
