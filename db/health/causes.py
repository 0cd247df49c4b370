"""Causes of a run's symptoms, by the evidence for and against each one.

Evidence is the events of halfstep.evidence and the run's skips. A cause that explains others
excludes them, in the order of `named`: first mistakes in the calls of a loop
(halfstep.diagnosis.loop_mistakes), since every later symptom may follow from them; then non-finite
numbers, by their first location; then all others.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.health import precision_findings, shadow_findings
from db.health.advice_words import AdviceWords
from db.health.losses import Growth, LostLosses, growth_before, lost_losses
from db.health.scaling_health import Figures, ScalingHealth, has_scaler
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
    mistaken_calls,
    names_of,
    other_mistakes,
)
from halfstep.diagnosis.observations import ZEROING
from halfstep.number_formats import number
from halfstep.number_formats import scale as scale_text
from halfstep.telemetry import events
from halfstep.telemetry.events import StepEvent
from halfstep.telemetry.flags import NONFINITE_LOSS, UNKNOWN_LOSS

#: Kinds of events of which the newest counts, the earliest counts, and several count.
NEWEST: tuple[type[StepEvent], ...] = (
    *(events.DirectStep, events.NotStepped, events.ScaledClip, events.BoundedNorms),
    *(events.Uncleared, events.AccumulatedGradients, events.ScalerReplaced, events.NoStep),
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
LARGE_WEIGHT = 1000.0  # no usual initial weight or gain is as large
COSTLY_SETTLED = 10  # per cent of the steps since the search: a saw-tooth at the limit skips fewer
SMALLEST_SCALE = 2.0**-24  # below it no usual gradient overflows
OUTSIDE = "training_step"  # a replay's name for operations outside of all modules


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
        _of_replay(replay)
        for replay in replays
        if replay.exact and (replay.found or replay.loss_nonfinite)
    ]
    first = _first_nonfinite_loss(session, run)
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
        resumed=_resumed(session, run),
        finite_at=finite_at,
        finite_again=None if first is None else _finite_again(session, run, first, finite_at),
        lost=lost_losses(session, run),
        growth=None if bad is None else growth_before(session, run, bad),
    )


def _first_nonfinite_loss(session: Session, run: Run) -> int | None:
    first = (
        select(func.min(Step.step))
        .with_hint(Step, "INDEXED BY ix_steps_nonfinite", "sqlite")
        .where(Step.run_id == run.id, FLAGGED["nonfinite"])
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


def _of_replay(replay: events.Replay) -> StepEvent:
    """Return a replay's result as an armed step, or as the origin that earlier versions found."""
    if isinstance(replay.defect, Defect):
        return events.ShadowStep(step=replay.step, armed=1, defects=[replay.defect])
    is_outside = replay.module in (None, "", OUTSIDE)
    kind: Any = "outside" if is_outside else "inside"
    if replay.loss_nonfinite and replay.direction != "forward":
        kind = "inputs"  # no operation of the forward pass produced it from finite numbers
    elif replay.direction == "backward":  # earlier versions did not classify the operation
        is_half = str(replay.dtype).endswith("float16")
        kind = replay.kind or ("overflow" if is_half else "hidden")
    return events.Origin(
        step=replay.step,
        scale=float(replay.scale),
        direction="backward" if replay.direction == "backward" and kind != "inputs" else "forward",
        kind=kind,
        operation=replay.operation,
        dtype=replay.dtype and replay.dtype.removeprefix("torch."),
        module=None if is_outside else replay.module,
        source=None,
    )


def _resumed(session: Session, run: Run) -> tuple[int, float, float] | None:
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
    calls = list(mistaken_calls(signs))
    yield from calls
    observed = shadow_findings.observed(signs.several(events.ShadowStep), _lost_at(signs))
    if not calls:
        numbers = list(shadow_findings.explaining(observed, _grown(signs)))
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
    is_explained = any(each.first.kind in ZEROING for each in observed)
    for finding in other_mistakes(signs):
        if not (is_explained and finding.cause == "zero_gradients"):
            yield finding
    yield from shadow_findings.others(observed, are_mild=True)


def _lost_at(signs: Signs) -> int | None:
    """Return the step from which on the weights of a loop without a scaler are not finite."""
    if signs.has_scaler:
        return None
    event = signs.one(events.FirstNonfinite)
    return event.step if event else signs.first_lost[0] if signs.first_lost else None


# ---- Numbers that are not finite --------------------------------------------------------------


def _numbers(signs: Signs, words: AdviceWords) -> Iterator[Finding]:
    """Yield the first location of non-finite numbers, the most fundamental cause first."""
    origins = [
        origin
        for origin in signs.several(events.Origin)
        if (origin.direction, origin.kind) != ("forward", "unobserved")  # see _forward
    ]
    kinds = [origin.kind for origin in origins]
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
    elif "inputs" in kinds:
        origin = origins[kinds.index("inputs")]
        yield Finding(
            "The batch is not finite",
            f"At step {origin.step:,} the loss was not finite, and "
            + (
                f"neither was the input of {origin.module}. "
                if origin.module
                else "no operation turned finite numbers into inf or NaN: the batch contained it. "
            )
            + "Neither precision nor loss scale can fix this: find the samples, and clean or drop "
            "them.",
            cause="nonfinite_inputs",
            fix=fixes.INPUTS,
        )
    elif undefined := [origin for origin in origins if _is_undefined(origin)]:
        yield _singular(signs, undefined[0], len(undefined))
    elif adam := signs.one(events.AdamEps):
        yield _adam_eps(adam)
    elif first_step := signs.one(events.FirstNonfinite):
        yield from _first_nonfinite(signs, first_step, words)
    elif "unobserved" in kinds and len(set(kinds)) == 1:
        yield Finding(
            "The operation that makes a gradient NaN or inf is unknown",
            f"At step {origins[0].step:,} the loss was finite, but gradients were not. The graph "
            "has more than 200,000 nodes, too many to observe all: the operation may be an "
            f"unobserved one, on another rank, or a gradient hook.{words.find_operator}",
            is_certain=False,
            part="skipped",
        )
    elif "elsewhere" in kinds and len(set(kinds)) == 1:
        yield Finding(
            "The gradient became NaN or inf outside this process's graph",
            f"At step {origins[0].step:,} no operation of the backward pass produced an inf or "
            "NaN, but the gradients contained one: it came from another rank or a gradient hook. "
            f"Watch the loop on every rank to find out which.{_at_any_scale(signs)}",
            is_certain=False,
            part="skipped",
            cause="singular_gradient" if _at_any_scale(signs) else "",
            fix=fixes.SINGULAR if _at_any_scale(signs) else "",
        )
    elif "overflow" not in kinds and (text := _at_any_scale(signs)):
        _, total = lost_skips(signs.skips)
        yield Finding(
            "A gradient is undefined at every loss scale",
            f"The loss was finite at each of the last {total:,} skips, but gradients "
            f"were not.{text} The operation was not observed.{words.find_operator}",
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


def _is_undefined(origin: events.Origin) -> bool:
    """Return whether a gradient was non-finite for another reason than the range of its type."""
    is_hidden = origin.kind == "hidden" and origin.direction == "backward"
    return origin.kind == "singular" or is_hidden


def lost_skips(skips: Sequence[ScalerEvent]) -> tuple[int, int]:
    """Return in how many skipped steps the loss was not finite, and how many steps these are.

    Each optimizer of a step has a skip of its own.
    """
    lost = {skip.step for skip in skips if skip.loss_nonfinite}
    return len(lost), len({skip.step for skip in skips})


def _singular(signs: Signs, event: events.Origin, count: int) -> Finding:
    lost, total = lost_skips(signs.skips)
    where = " of ".join(filter(None, (event.operation, event.module)))
    source = f", at {event.source}" if event.source else ""
    return Finding(
        f"The gradient of {where} is undefined",
        f"At step {event.step:,}, with a finite loss and a scale of "
        f"{scale_text(event.scale)}, {event.operation}{source} was the first operation of "
        f"the backward pass whose gradient was not finite (observed {_times(count)}). "
        + (
            "The derivative of a root, logarithm or division is infinite at 0, in every precision "
            "and at every loss scale."
            if event.kind == "singular"
            else "Its type represents far larger numbers, so this is not an overflow: an infinite "
            "factor from the forward pass, such as the logarithm of 0 behind a mask, times 0 is "
            "NaN."
        )
        + (f" {_lost_losses(lost, total)}." if lost else ""),
        before=event.step,
        cause="singular_gradient",
        fix=fixes.SINGULAR,
        part="skipped",
    )


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
    if grown := _grown(signs):
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


def _grown(signs: Signs) -> str:
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
    """Yield overflows: of the forward pass always, of the backward pass if they cost many steps."""
    origins = [o for o in signs.several(events.Origin) if o.direction == "forward"]
    is_unwell = signs.health in ("collapsing", "dead") or signs.is_costly
    buffers = list(precision_findings.nonfinite_buffers(signs.one(events.NonfiniteBuffers), words))
    yield from buffers if not is_unwell else ()
    if any(skip.loss_nonfinite for skip in signs.skips):
        yield from _forward(signs, origins, words, is_lasting=is_unwell)
    elif signs.skips and is_unwell:
        yield _backward(signs, words)
    yield from buffers if is_unwell else ()


def _lost_losses(lost: int, total: int) -> str:
    return f"At {lost:,} of the last {total:,} skips the loss itself was not finite"


def _forward(
    signs: Signs,
    origins: Sequence[events.Origin],
    words: AdviceWords,
    *,
    is_lasting: bool,
) -> Iterator[Finding]:
    last = max(s.step for s in signs.skips if s.loss_nonfinite)
    text = f"{_lost_losses(*lost_skips(signs.skips))}, most recently at step {last:,}"
    module, grown, has_large, is_certain = None, "", False, False
    if signs.lost:
        text += (
            f". {signs.lost.count:,} other steps with such a loss were applied: at a smaller "
            "scale their gradients were finite. "
        )
    else:
        text += "; the loss scale is not the cause, and a smaller one does not help. "
    fix = fixes.FORWARD
    remedies: tuple[str, ...] = ("lower_rate", "bf16") if is_lasting else ("bf16",)
    before = min(skip.step for skip in signs.skips if skip.loss_nonfinite)
    inside = [origin for origin in origins if origin.kind == "inside"]
    kinds = {origin.kind for origin in origins}
    is_finite_again = signs.finite_at is not None and signs.finite_at > last
    finite = (
        f" At step {signs.finite_at:,} it was finite, so not every batch causes this."
        if is_finite_again
        else ""
    )
    if kinds <= {"unobserved"} and words.find_operator:
        yield Finding(
            "The loss of a skipped step was not finite",
            f"{text}It is unknown whether the batch contained NaN or inf, or the forward pass "
            f"overflowed: the step was not armed. Check the batch of that step.{finite}"
            f"{words.find_operator}",
            before=before,
            part="skipped",
            is_certain=False,
        )
        return
    if inside:
        event, is_certain = inside[0], True
        before = min(before, *(origin.step for origin in inside))
        text += (
            f"At step {event.step:,} the output of {event.module}, in {event.dtype}, was the first "
            "non-finite one, with finite inputs and weights. "
        )
        has_large = _has_large_weight(signs, event)
        if grown := _grown(signs):
            text, remedies = text + grown, ("lower_rate",) if is_lasting else ()
        elif has_large:
            text += (
                f"Its largest weight is {number(event.largest_weight or 0)}. If training made it "
                "this large, lower the learning rate, warm it up, or clip gradients, and "
                "start again from smaller weights."
            )
            remedies = ("lower_rate",) if is_lasting else ()
        elif event.dtype == "float16" and float(event.largest_input or 0) > LARGEST_HALF:
            text += (
                f"Its input reaches {number(event.largest_input or 0)}, above fp16's maximum of "
                "65,504, so it becomes inf in fp16. Normalize or clamp it."
            )
            fix = fixes.LARGE_INPUT
        elif event.dtype == "float16" and event.may_be_undefined:
            module, is_certain = event.module, False
            text += (
                f"Run it in fp32, {words.in_fp32}, or use bf16. If it is NaN in fp32 too, an "
                "operation in it is undefined, such as a softmax over a fully masked row or a "
                "division by 0."
            )
        elif event.dtype == "float16":
            module = event.module
            text += f"Run it in fp32, {words.in_fp32}, or use bf16."
        else:
            yield Finding(
                f"The output of {event.module} is not finite",
                f"{text}Either an operation in it is undefined, such as a division by 0 or the "
                "logarithm of 0, or a part of it computes in fp16 and overflows. Running it in "
                "fp32 excludes the overflow.",
                before=before,
                part="skipped",
                cause="undefined_forward",
                fix=fixes.UNDEFINED_FORWARD,
            )
            return
    elif any(origin.kind == "weights" for origin in origins):
        text += "Its weights were already not finite: an earlier step applied an inf."
        remedies, fix = (), ""
    elif any(origin.kind == "outside" for origin in origins):
        text += outside(signs) + (
            (grown := _grown(signs))
            or "Compute the loss in fp32, and look for logarithms and divisions of 0."
        )
        fix = fixes.FORWARD_LOSS
    else:
        where = "It is unknown where it arose and whether other batches are finite."
        text += (
            f"{finite.lstrip() or where} Check the batch of step {last:,}, and look for "
            "activations near 65,504; if it happens again, run the module in fp32, "
            f"{words.in_fp32}, or use bf16.{words.find_operator}"
        )
    verb = "overflows" if is_lasting else "overflowed"
    yield Finding(
        f"Training diverged until the forward pass {verb}" if grown else f"The forward pass {verb}",
        text,
        module=module,
        before=before,
        remedies=remedies,
        part="skipped",
        cause="forward_overflow",
        fix=fixes.DIVERGED if grown or has_large else fix,
        is_certain=is_certain,
    )


def _has_large_weight(signs: Signs, event: events.Origin) -> bool:
    """Return whether a module that was trained has a weight that is too large for any input."""
    has_trained = signs.steps > signs.skipped
    return has_trained and float(event.largest_weight or 0) >= LARGE_WEIGHT


def outside(signs: Signs) -> str:
    """Return a sentence on where outside of all modules a loss became non-finite, or ""."""
    found = [o for o in signs.several(events.Origin) if o.kind == "outside"]
    event = next((o for o in found if o.operation), next(iter(found), None))
    if event is None or event.direction != "forward":
        return ""
    text = "All modules' outputs were finite: it arose outside them, in the loss function"
    if event.operation:
        where = f" at {event.source}" if event.source else ""
        text += f"; the first non-finite gradient is that of {event.operation}{where}"
        # In fp32 it may follow from an overflow of fp16 before a conversion.
        text += ", in float16" if event.dtype == "float16" else ""
    return f"{text}. "


def _backward(signs: Signs, words: AdviceWords) -> Finding:
    _, total = lost_skips(signs.skips)
    overflow = [o for o in signs.several(events.Origin) if o.kind == "overflow"]
    text = (
        f"At each of the last {total:,} skips the gradients were not finite, while every observed "
        f"loss was: at this scale they are {'' if overflow else 'most likely '}too large for fp16. "
    )
    if overflow:
        event = overflow[0]
        where = " of ".join(filter(None, (event.operation, event.module)))
        text += f"At step {event.step:,} {where} overflowed first, in {event.dtype}. "
    if signs.scale is not None and signs.scale < 1:
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
    is_below = signs.scale is not None and signs.scale < 1
    return Finding(
        "The loss scale is below 1" if is_below else "Only the backward pass overflows",
        text,
        before=signs.fell_at if is_below else None,
        remedies=("floor", "lower_rate", "bf16") if is_below else (),
        part="skipped",
        cause="backward_overflow",
        fix=fixes.BACKWARD,
        is_certain=bool(overflow),
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
