"""Causes of a run's symptoms, by the evidence for and against each one.

Evidence is the events of halfstep.evidence and the run's skips. A cause that explains others
excludes them, in the order of `named`: first mistakes in the calls of a loop
(halfstep.diagnosis.loop_mistakes), since every later symptom may follow from them; then non-finite
numbers, by their first location; then all others.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.health import precision_findings, shadow_findings
from db.health.advice_words import AdviceWords
from db.health.losses import Growth, LostLosses, growth_before, lost_losses
from db.health.scaling_health import has_scaler
from db.tables import FLAGGED, Run, RunNode, ScalerEvent, Step
from db.telemetry import step_rows
from db.telemetry.stored_events import StoredEvents
from halfstep.diagnosis import fixes
from halfstep.diagnosis.defect import Defect
from halfstep.diagnosis.finding import Finding
from halfstep.diagnosis.loop_mistakes import (
    NAMES_SHOWN,
    ZERO_STEPS,
    LoopSigns,
    find_mistaken_calls,
    find_other_mistakes,
    names_of,
)
from halfstep.diagnosis.observations import ZEROING, Observation
from halfstep.diagnosis.statements import is_loss_right
from halfstep.diagnosis.statements import named as site_in_words
from halfstep.number_formats import number
from halfstep.number_formats import scale as scale_text
from halfstep.telemetry import events
from halfstep.telemetry.events import StepEvent
from halfstep.telemetry.flags import NONFINITE_LOSS, UNKNOWN_LOSS
from halfstep.telemetry.scaling_health import Figures, ScalingHealth

#: Kinds of events of which the newest counts, the earliest counts, and several count.
NEWEST: tuple[type[StepEvent], ...] = (
    *(events.DirectStep, events.NotStepped, events.ScaledClip, events.BoundedNorms),
    *(events.GradientsDropped, events.MixedScales),
    *(events.Uncleared, events.AccumulatedGradients, events.ScalerReplaced, events.NoStep),
    *(events.ScalerLeftBehind, events.RoundedState),
    *(events.NoInfChecks, events.Fp16Gradients, events.AdamEps, events.Schedule),
    *(events.CallOrder, events.UnscaledLoss, events.OutsideOptimizers),
)
EARLIEST: tuple[type[StepEvent], ...] = (
    events.BadInputs,
    events.FirstNonfinite,
    events.NonfiniteBuffers,
)
SEVERAL: tuple[type[StepEvent], ...] = (
    *(events.Origin, events.NoGradient, events.Precision, events.ShadowStep),
)
MOST_EVENTS = 50  # of a kind of which several count
#: Skips from a scale of 2^40 down to 1, and skips in 100 steps that exceed a search for a scale.
LONGEST_SEARCH, COSTLY = 40, 25
LARGEST_HALF = 65504.0
COSTLY_SETTLED = 10  # per cent of the steps since the search: a saw-tooth at the limit skips fewer
SMALLEST_SCALE = 2.0**-24  # below it no usual gradient overflows


@dataclass(frozen=True)
class Signs(LoopSigns):
    """Evidence from which causes are derived."""

    skips: Sequence[ScalerEvent] = ()
    steps: int = 0  # attempted
    skipped: int = 0
    health: str | None = None
    is_costly: bool = False  # more steps are skipped than a search for a scale takes
    fell_at: int | None = None  # the step from which on the scale was below 1
    may_replay: bool = False
    precision: str = ""
    #: The first step of a run without a scaler with a number that is not finite; was its loss?
    first_lost: tuple[int, bool] | None = None
    finite_at: int | None = None  # the last step, if its loss is known to be finite
    #: A step with a finite loss after the first without, whose gradients are unknown.
    finite_again: int | None = None
    lost: LostLosses | None = None  # applied steps with a non-finite loss and finite gradients
    growth: Growth | None = None  # of the loss before what was first seen


def read(
    session: Session,
    run: Run,
    stored: StoredEvents,
    skips: Sequence[ScalerEvent],
    replays: Sequence[events.Replay],
    health: ScalingHealth | None,
    *,
    may_replay: bool,
) -> Signs:
    """Read the signs of a run. skips: the latest.  replays: of its first skips.

    may_replay: its page offers to replay a skipped step.
    """
    figures = health.figures if health else None
    found: list[StepEvent] = []
    for kind in NEWEST:
        found += stored.latest(kind, most=1)
    for kind in EARLIEST:
        found += stored.first(kind, most=1)
    for kind in SEVERAL:
        found += stored.latest(kind, most=MOST_EVENTS)
    found += [
        events.ShadowStep(step=replay.step, armed=1, defects=[replay.defect])
        for replay in replays
        if replay.exact and isinstance(replay.defect, Defect)
    ]
    first = first_flagged_step(session, run.id, "nonfinite")
    armed = [event for event in found if isinstance(event, events.ShadowStep)]
    bad = min(filter(None, (first, shadow_findings.first_step(armed))), default=None)
    finite_at = None if run.last_flags & (NONFINITE_LOSS | UNKNOWN_LOSS) else run.step
    return Signs(
        events=found,
        skips=skips,
        steps=run.own_steps,
        last=run.step,
        skipped=run.skipped,
        zero_steps=run.zero_steps,
        health=health.word if health else None,
        scale=run.scale,
        is_costly=_is_costly(figures),
        fell_at=_fell_at(session, run),
        has_scaler=has_scaler(run),
        precision=run.precision,
        may_replay=may_replay,
        first_lost=None if has_scaler(run) else _first_nonfinite_step(session, run, first),
        resumed=_find_resume(session, run),
        finite_at=finite_at,
        finite_again=None if first is None else _finite_again(session, run, first, finite_at),
        lost=lost_losses(session, run),
        growth=None if bad is None else growth_before(session, run, bad),
    )


def first_flagged_step(
    session: Session, run_id: int, flag: Literal["nonfinite", "skipped"]
) -> int | None:
    """Return the first step of a run that was skipped, or whose loss was not finite."""
    first = (
        select(func.min(Step.step))
        .with_hint(Step, f"INDEXED BY ix_steps_{flag}", "sqlite")
        .where(Step.run_id == run_id, FLAGGED[flag])
    )
    return session.scalar(first)


def _first_nonfinite_step(session: Session, run: Run, step: int | None) -> tuple[int, bool] | None:
    """Return the first step that was not finite, and whether its loss was. step: of a loss."""
    if step is None:
        return None
    before = step_rows.rows_at(session, run.id, [step - 1])
    was_nan = any(math.isnan(row.with_nan().grad_norm or 0.0) for row in before)
    return (step - 1, True) if was_nan else (step, False)


def _finite_again(session: Session, run: Run, step: int, last: int | None) -> int | None:
    """Return a step with a finite loss after one without, whose gradients are unknown.

    It is the next or the last one.  last: the last step, if its loss is finite.
    """
    rows = step_rows.read_rows(session, run.id, first=step, most=2)
    if not rows or rows[0].with_nan().grad_norm is not None:
        return None
    finite = [row.step for row in rows if row.loss is not None and math.isfinite(row.loss)]
    return next(iter(finite), last if last is not None and last > step else None)


def _is_costly(figures: Figures | None) -> bool:
    if figures is None:
        return False
    is_search = figures.skips_1000 < LONGEST_SEARCH or figures.skips_100 < COSTLY
    is_saw = 100 * figures.settled_skips <= COSTLY_SETTLED * figures.settled
    return not is_search or not is_saw


def _fell_at(session: Session, run: Run) -> int | None:
    if not run.skipped or run.scale is None or run.scale >= 1:
        return None
    query = select(func.min(ScalerEvent.step)).where(ScalerEvent.run_id == run.id)
    return session.scalar(query.where(ScalerEvent.scale_after < 1))


def _find_resume(session: Session, run: Run) -> tuple[int, float, float] | None:
    """Return the latest resume after which the scale was higher than one growth explains."""
    query = select(RunNode.resumed_step).where(
        RunNode.run_id == run.id, RunNode.attempt > 1, RunNode.resumed_step > 0
    )
    for step in session.scalars(query.order_by(RunNode.attempt.desc()).limit(5)):
        if step is None:
            continue
        pair = [row.scale for row in step_rows.rows_at(session, run.id, (step, step + 1))]
        if len(pair) == 2 and pair[0] and pair[1] and pair[1] > 2 * pair[0]:
            return step, pair[0], pair[1]
    return None


def named(signs: Signs, words: AdviceWords) -> Iterator[Finding]:
    """Yield the causes for which there is evidence; the first one explains the others."""
    has_zeros = signs.zero_steps >= ZERO_STEPS
    calls = list(find_mistaken_calls(signs))
    observed = shadow_findings.observe(signs.several(events.ShadowStep), _lost_at(signs))
    calls, observed = _join_clips(calls, observed)
    yield from calls
    if signs.health == "healthy":  # over all steps, of which armed ones and replays are a few
        observed = [row for row in observed if row.first.kind != "scale_too_large"]
    if not calls:
        numbers = list(shadow_findings.explaining(observed, _describe_growth(signs)))
        if numbers:
            buffers = signs.one(events.NonfiniteBuffers)
            numbers += precision_findings.nonfinite_buffers(buffers, words)
        else:
            numbers += _numbers(signs, words)
        yield from numbers
        if not numbers and not has_zeros:
            yield from _skips(signs, words)
        if not signs.has_scaler and not numbers:
            yield from _first_lost(signs, words)
    yield from shadow_findings.others(observed, are_mild=False)
    is_explained = any(
        (observation.first.kind in ZEROING and not observation.is_of_validation)
        or is_loss_right(observation.first)
        for observation in observed
    )
    for finding in find_other_mistakes(signs):
        if not (is_explained and finding.cause == "zero_gradients"):
            yield finding
    yield from shadow_findings.others(observed, are_mild=True)


def _lost_at(signs: Signs) -> int | None:
    """Return the step from which on the weights of a loop without a scaler are not finite."""
    if signs.has_scaler:
        return None
    event = signs.one(events.FirstNonfinite)
    return event.step if event else signs.first_lost[0] if signs.first_lost else None


def _join_clips(
    calls: list[Finding], observed: list[Observation]
) -> tuple[list[Finding], list[Observation]]:
    """Return both, with a clip of scaled gradients in one finding that has its line, too."""
    clips = [finding for finding in calls if finding.cause == "scaled_gradients_clipped"]
    edits = [each for each in observed if each.first.kind == "scaled_gradients_edited"]
    if not clips or not edits:
        return calls, observed
    [clip], [edit, *_] = clips, edits
    text = f"{clip.text} An armed step saw it in {site_in_words(edit.first.site)}."
    joined = [replace(clip, text=text) if finding is clip else finding for finding in calls]
    return joined, [each for each in observed if each is not edit]


# ---- Numbers that are not finite --------------------------------------------------------------


def _numbers(signs: Signs, words: AdviceWords) -> Iterator[Finding]:
    """Yield the first location of non-finite numbers, the most fundamental cause first."""
    if (event := signs.one(events.BadInputs)) and event.inputs:
        first = event.inputs[0]
        names = ", ".join(
            f"{tensor.name} ({tensor.nan:,} NaN, {tensor.inf:,} inf)"
            for tensor in event.inputs[:NAMES_SHOWN]
        )
        yield Finding(
            f"{first.name} is not finite",
            f"At step {event.step:,} the loss was not finite, and neither was {names} in the "
            "training loop. If it is data, find the samples, and clean or drop them: neither "
            "precision nor loss scale helps. If the loop computes it, it may be a consequence."
            f"{words.find_operator}",
            cause="nonfinite_inputs",
            fix=fixes.INPUTS,
            is_certain=False,
        )
    elif adam := signs.one(events.AdamEps):
        yield _adam_eps(adam)
    elif first_step := signs.one(events.FirstNonfinite):
        yield from _first_nonfinite(signs, first_step, words)
    elif text := _at_any_scale(signs):
        _, total = lost_skips(signs.skips)
        yield Finding(
            "A gradient is undefined at every loss scale",
            f"The loss was finite at each of the last {total:,} skips, but gradients "
            f"were not.{text} {first_seen(signs)}".rstrip()
            + words.find_operator,
            cause="singular_gradient",
            fix=fixes.SINGULAR,
            is_certain=False,
            part="skipped",
        )


def _at_any_scale(signs: Signs) -> str:
    """Return a sentence on skips at scales too small for overflows in fp16, or ""."""
    scales = [skip.scale_before for skip in signs.skips if skip.scale_before]
    if not scales or min(scales) > SMALLEST_SCALE or any(s.loss_nonfinite for s in signs.skips):
        return ""
    return (
        f" This happened at scales down to {scale_text(min(scales))}, where fp16 represents "
        f"gradients up to {number(LARGEST_HALF / min(scales))}: a root, logarithm or division at 0 "
        "is far "
        "more likely than an overflow."
    )


def _first_lost(signs: Signs, words: AdviceWords) -> Iterator[Finding]:
    """Yield the first non-finite step of a run without a scaler, by its recorded steps."""
    if signs.first_lost is not None:
        step, loss_is_finite = signs.first_lost
        event = events.FirstNonfinite(
            step=step, loss_nonfinite=not loss_is_finite, culprits=[], finite=step - 1
        )
        yield from _first_nonfinite(signs, event, words)


def lost_skips(skips: Sequence[ScalerEvent]) -> tuple[int, int]:
    """Return in how many skipped steps the loss was not finite, and how many steps these are.

    Each optimizer of a step has a skip of its own.
    """
    lost = {skip.step for skip in skips if skip.loss_nonfinite}
    return len(lost), len({skip.step for skip in skips})


def _adam_eps(event: events.AdamEps) -> Finding:
    return Finding(
        f"eps of {event.optimizer} is 0 in float16",
        f"{event.count:,} parameters are float16, whose smallest number is 6e-8, and eps is "
        f"{number(event.eps)}: it rounds to 0, and where a gradient was 0 the update is 0/0. Keep "
        "the weights in float32 under autocast, or raise eps to about 1e-4.",
        cause="adam_eps_underflow",
        fix=fixes.ADAM_EPS,
    )


def _first_nonfinite(
    signs: Signs, event: events.FirstNonfinite, words: AdviceWords
) -> Iterator[Finding]:
    if event.loss_nonfinite and signs.lost:
        return  # the weights are finite
    if event.loss_nonfinite and signs.finite_again:
        yield Finding(
            f"The loss was not finite at step {event.step:,}",
            f"{_before(event.finite)}At step {signs.finite_again:,} the loss was finite again, so "
            "the weights are finite. Check the batch of that step for numbers that are not finite, "
            "and for a mean over zero elements, such as an empty mask.",
            before=event.step,
            is_fault=True,
        )
        return
    precision = signs.precision or "this precision"
    names = names_of([parameter.name for parameter in event.culprits])
    if event.loss_nonfinite:
        title = f"The loss is not finite from step {event.step:,} on"
        text = _before(event.finite) + (
            f"A number exceeded the range of {precision} there (the weights may have grown too "
            "large), or an operation was undefined: a logarithm of 0 or a division by 0."
        )
    else:
        title = f"Gradients are not finite from step {event.step:,} on"
        text = _before(event.finite) + (
            f"Its loss was finite. In its "
            f"backward pass a gradient{f' ({names})' if names else ''} was undefined or too large, "
            "or the batch contained an inf that the forward pass had hidden."
        )
    if grown := _describe_growth(signs):
        text = _before(event.finite) + grown
    yield Finding(
        title,
        f"{text} Without a scaler such a step is applied to the weights, so everything after it is "
        "a consequence. Continue from a checkpoint before this step, or restart."
        f"{words.find_operator}",
        before=event.step,
        cause="nonfinite_without_scaler",
        fix=fixes.DIVERGED if grown else fixes.FIRST_NONFINITE,
    )


def _before(finite: int) -> str:
    return f"{finite:,} steps before it were finite. " if finite else ""


def _describe_growth(signs: Signs) -> str:
    """Return a sentence on a loss that had grown until it was not finite, or ""."""
    if not (growth := signs.growth):
        return ""
    return (
        f"The loss had grown from {number(growth.first_loss)} at step {growth.first_step:,} to "
        f"{number(growth.last_loss)} at step {growth.last_step:,}: the training diverged, and the "
        "numbers grew until they were not finite. Lower the learning rate, warm it up, or clip "
        "gradients."
    )


def _skips(signs: Signs, words: AdviceWords) -> Iterator[Finding]:
    """Yield skips with a non-finite loss always, and others if they cost many steps."""
    is_unwell = signs.health in ("collapsing", "dead") or signs.is_costly
    buffers = list(precision_findings.nonfinite_buffers(signs.one(events.NonfiniteBuffers), words))
    yield from buffers if not is_unwell else ()
    if any(skip.loss_nonfinite for skip in signs.skips):
        yield _lost_loss(signs, words, is_lasting=is_unwell)
    elif signs.skips and is_unwell:
        yield _backward(signs, words)
    yield from buffers if is_unwell else ()


def first_seen(signs: Signs) -> str:
    """Return a sentence on the first non-finite value that an earlier version saw, or ""."""
    seen = signs.several(events.Origin)
    origin = next(
        (candidate for candidate in seen if candidate.module or candidate.operation), None
    )
    if origin is None:
        return ""
    where = " of ".join(filter(None, (origin.operation, origin.module)))
    source = f", at {origin.source}" if origin.source else ""
    dtype = f", in {origin.dtype}" if origin.dtype else ""
    value = {"forward": "output", "backward": "gradient"}[origin.direction]
    return f"At step {origin.step:,} {where}{source} had the first non-finite {value}{dtype}. "


def _lost_loss(signs: Signs, words: AdviceWords, *, is_lasting: bool) -> Finding:
    """Return the finding of skips with a non-finite loss, whose operator was not observed."""
    lost, total = lost_skips(signs.skips)
    last = max(skip.step for skip in signs.skips if skip.loss_nonfinite)
    if signs.lost:
        scale = (
            f". {signs.lost.count:,} other steps with such a loss were applied: at a smaller "
            "scale their gradients were finite. "
        )
    else:
        scale = "; the loss scale is not the cause, and a smaller one does not help. "
    grown = _describe_growth(signs)
    is_finite_again = signs.finite_at is not None and signs.finite_at > last
    batch = (
        f"At step {signs.finite_at:,} it was finite, so not every batch causes this."
        if is_finite_again
        else "It is unknown whether other batches are finite."
    )
    unknown = (
        "It is unknown whether the batch contained NaN or inf, an operation was undefined, or a "
        f"value overflowed. {batch} Check the batch of step {last:,}."
    )
    return Finding(
        "Training diverged until the loss was not finite"
        if grown
        else "The loss of a skipped step was not finite",
        f"At {lost:,} of the last {total:,} skips the loss itself was not finite, most recently at "
        f"step {last:,}{scale}{first_seen(signs)}{grown or unknown}{words.find_operator}",
        before=min(skip.step for skip in signs.skips if skip.loss_nonfinite),
        remedies=("lower_rate",) if grown or is_lasting else (),
        part="skipped",
        fix=fixes.DIVERGED if grown else "",
        is_certain=False,
    )


def _backward(signs: Signs, words: AdviceWords) -> Finding:
    _, total = lost_skips(signs.skips)
    is_below = signs.scale is not None and signs.scale < 1
    text = (
        f"At each of the last {total:,} skips the gradients were not finite, while every observed "
        f"loss was: at this scale they are most likely too large for fp16. {first_seen(signs)}"
    )
    if is_below:
        text += (
            f"The scale is {scale_text(signs.scale)}, below 1: gradients overflow nevertheless, "
            f"and a smaller scale only makes others underflow. Clip the gradients, continue from "
            f"before the scale fell with a smaller learning rate, {words.stop_falling}, or use "
            "bf16."
        )
        if signs.may_replay:
            text += " Replay a skipped step to find the module."
    else:
        text += (
            f"Raise {words.scaler('growth_interval')} to make overflows less frequent"
            f"{words.hold_down}."
        )
    return Finding(
        "The loss scale is below 1" if is_below else "Only the backward pass overflows",
        text,
        before=signs.fell_at if is_below else None,
        remedies=("floor", "lower_rate", "bf16") if is_below else (),
        part="skipped",
        cause="backward_overflow",
        fix=fixes.BACKWARD,
        is_certain=False,
    )
