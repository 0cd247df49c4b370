"""Mistakes in the calls of a training loop, from the events that its observation emits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from halfstep.diagnosis import fixes
from halfstep.diagnosis.finding import Finding
from halfstep.number_formats import number, percent, quantity
from halfstep.number_formats import scale as scale_text
from halfstep.telemetry import events
from halfstep.telemetry.events import StepEvent

E = TypeVar("E", bound=StepEvent)
#: Numbers of times from which on a mistake is none that happens once.
UNCLEARED, REPLACED, LEFT_OUT, UNSCALED = 2, 3, 2, 3
ZERO_STEPS = 50  # in a row with all gradients 0: nothing is learned
#: Share of skipped steps from which on a schedule that advances in them matters, and of all steps
#: from which on those that the loop omits are a mistake.
OFTEN = 0.1
NAMES_SHOWN = 6


@dataclass(frozen=True)
class LoopSigns:
    """Evidence of a loop's mistakes."""

    events: Sequence[StepEvent] = ()
    last: int = 0  # the last step
    zero_steps: int = 0  # the last ones, all of whose gradients were 0
    scale: float | None = None
    has_scaler: bool = False
    resumed: tuple[int, float, float] | None = None  # step, scale before it and after

    def one(self, kind: type[E]) -> E | None:
        """Return the event of a kind; None if there is none."""
        return next(iter(self.several(kind)), None)

    def several(self, kind: type[E]) -> list[E]:
        """Return all events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]


def find_mistaken_calls(signs: LoopSigns) -> Iterator[Finding]:
    """Yield mistakes from which every later symptom may follow."""
    yield from _find_refused(signs)
    yield from _find_out_of_order(signs)
    yield from _find_mixed(signs)
    yield from _find_unscaled(signs)
    yield from _find_direct_steps(signs)
    yield from _find_uncleared(signs)
    yield from _find_dropped(signs)
    yield from _find_clipped(signs)
    yield from _scaler_lost(signs)


def find_other_mistakes(signs: LoopSigns) -> Iterator[Finding]:
    """Yield mistakes that explain nothing but themselves."""
    yield from _scaler_left_behind(signs)
    yield from _rounded_state(signs)
    yield from _gradients(signs)
    yield from _left_out(signs)
    yield from _schedule(signs)
    yield from _pointless_scaler(signs)


def names_of(names: Sequence[str]) -> str:
    """Return the first names of a list, and the number of the others."""
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def _find_refused(signs: LoopSigns) -> Iterator[Finding]:
    if event := signs.one(events.NoStep):
        yield Finding(
            "No optimizer of torch.optim steps" if event.is_by_hand else "No optimizer steps",
            f"{event.passes:,} backward passes were made and no optimizer of torch.optim "
            "stepped. Steps of a loop that changes its weights by hand cannot be recorded; log its "
            "loss with watch.log.",
            cause="no_optimizer_step",
            evidence=event,
            fix="" if event.is_by_hand else fixes.NO_OPTIMIZER,
            is_harmless=event.is_by_hand,
        )
    if refused := signs.one(events.Fp16Gradients):
        yield Finding(
            "GradScaler rejects float16 gradients",
            f"{refused.count:,} parameters are float16 ({names_of(refused.parameters)}), so their "
            f'gradients are too, and GradScaler raised "{refused.error}". Keep the weights in '
            "float32: autocast computes in float16 all the same.",
            cause="fp16_gradients",
            evidence=refused,
            fix=fixes.FP16_GRADIENTS,
        )
    if unchecked := signs.one(events.NoInfChecks):
        which = names_of(unchecked.optimizers) or "an optimizer"
        yield Finding(
            "A scaler has no gradients to check",
            f'At step {unchecked.step:,} GradScaler.{unchecked.method} raised "{unchecked.error}": '
            f"no parameter of {which} had a gradient. Its loss does not reach its parameters "
            "(detach, no_grad, frozen), or it holds parameters of another model, or backward was "
            "not called before the step, or zero_grad was called between the two.",
            cause="no_inf_checks",
            evidence=unchecked,
            fix=fixes.NO_INF_CHECKS,
        )


def _find_out_of_order(signs: LoopSigns) -> Iterator[Finding]:
    if not (event := signs.one(events.CallOrder)) or signs.last > event.step + 1:
        return  # the loop caught it and went on
    said = f'At step {event.step:,} GradScaler.{event.method} raised "{event.error}" '
    if "_scale is None" in event.error:
        yield Finding(
            "The loss was never scaled",
            f"{said}Call backward on scaler.scale(loss): the scaler has no scale before its first "
            "loss.",
            cause="loss_not_scaled",
            evidence=event,
            fix=fixes.SCALED_LOSS,
        )
        return
    if event.method == "step":
        title = "scaler.update is missing between two steps"
        text = "Call scaler.update() before the next scaler.step() of the same optimizer."
    elif "after" in event.error:
        title = "unscale_ is called after the step"
        text = (
            "Call unscale_ after backward and before scaler.step(). Either this call comes too "
            "late, or scaler.update() is missing after the previous step."
        )
    else:
        title = "unscale_ is called twice in one step"
        text = (
            "Call unscale_ at most once per optimizer before each scaler.update(). With gradient "
            "accumulation, call it only after the last backward pass of a step."
        )
    yield Finding(title, said + text, cause="scaler_call_order", fix=fixes.CALL_ORDER)


def _find_mixed(signs: LoopSigns) -> Iterator[Finding]:
    if event := signs.one(events.MixedScales):
        yield Finding(
            "Gradients of different loss scales are added",
            f"In {quantity(event.count, 'step')} of {event.optimizer}, most recently at step "
            f"{event.step:,}, scaler.update() has changed the scale between backward passes whose "
            "gradients are added. All are divided by the last scale, so those of the passes before "
            "count too much or too little.",
            cause="scaler_call_order",
            evidence=event,
            fix=fixes.CALL_ORDER,
        )


def _find_unscaled(signs: LoopSigns) -> Iterator[Finding]:
    event = signs.one(events.UnscaledLoss)
    if event and event.count >= UNSCALED:
        scale = f", most recently {scale_text(signs.scale)}" if signs.scale else ""
        yield Finding(
            "A loss is not scaled",
            f"In {event.count:,} steps of {event.optimizer}, most recently at step "
            f"{event.step:,}, backward was called on a loss without scaler.scale(). The scaler "
            f"divides all gradients by the scale{scale}, including those of "
            "that loss: with SGD they barely change the weights, next to those of a scaled loss "
            "they are negligible, and the small ones become 0 in fp16.",
            cause="loss_not_scaled",
            evidence=event,
            fix=fixes.SCALED_LOSS,
        )


def _find_direct_steps(signs: LoopSigns) -> Iterator[Finding]:
    if not (event := signs.one(events.DirectStep)):
        return
    how = (
        "its gradients were still multiplied by the loss scale"
        if event.is_scaled
        else "scaler.step had already stepped it, or should have"
    )
    yield Finding(
        f"{event.optimizer} is stepped outside the scaler",
        f"optimizer.step() was called {event.count:,} times outside scaler.step(), most recently "
        f"at step {event.step:,}: {how}. Such a step applies an inf or NaN unchecked, and "
        "the weights stay NaN.",
        cause="step_outside_scaler",
        evidence=event,
        fix=fixes.DIRECT_STEP,
        part="skipped",
    )


def _find_uncleared(signs: LoopSigns) -> Iterator[Finding]:
    event = signs.one(events.Uncleared)
    if event and event.count >= UNCLEARED:
        yield Finding(
            "Gradients are never cleared",
            f"After a skip, {event.count:,} backward passes added to gradients of "
            f"{event.optimizer} that were already not finite, most recently at step "
            f"{event.step:,}. An inf stays in .grad until zero_grad() is called, so every later "
            "step is skipped, whatever the scale.",
            cause="gradients_not_cleared",
            evidence=event,
            fix=fixes.ZERO_GRAD,
            part="skipped",
        )
    elif kept := signs.one(events.AccumulatedGradients):
        yield Finding(
            "Gradients are never cleared",
            f"Up to step {kept.step:,}, {kept.steps:,} steps of {kept.optimizer} in a "
            "row applied gradients that include those of the step before: zero_grad() was not "
            "called between them, so each update sums the gradients of all their batches.",
            cause="gradients_not_cleared",
            evidence=kept,
            fix=fixes.ZERO_GRAD if signs.has_scaler else fixes.ZERO_GRAD_UNSCALED,
        )


def _find_clipped(signs: LoopSigns) -> Iterator[Finding]:
    if event := signs.one(events.ScaledClip):
        yield Finding(
            "Gradients are clipped before unscale_",
            f"The gradients of {event.optimizer} were clipped at least {event.count:,} times "
            f"while they were multiplied by the loss scale, most recently at step "
            f"{event.step:,}. The clip then bounds gradient × scale: the update shrinks as the "
            "scale grows.",
            cause="scaled_gradients_clipped",
            evidence=event,
            fix=fixes.CLIP,
        )
    elif bounded := signs.one(events.BoundedNorms):
        yield Finding(
            "Gradients are bounded while they are scaled",
            f"The gradient norm times the loss scale was {number(bounded.norm)} in "
            f"{bounded.steps:,} applied steps of different scales, up to step {bounded.step:,}. "
            "Something bounds the gradients before they are unscaled, so the update depends on the "
            "scale.",
            cause="scaled_gradients_clipped",
            evidence=bounded,
            fix=fixes.CLIP,
        )


def _scaler_lost(signs: LoopSigns) -> Iterator[Finding]:
    event = signs.one(events.ScalerReplaced)
    if event and (float(event.scale_after) > float(event.scale_before) or event.count >= REPLACED):
        yield Finding(
            "A new scaler replaces the old one",
            f"{event.count:,} times another GradScaler stepped the same optimizer, the last "
            f"time at step {event.step:,}, with a scale of {scale_text(event.scale_after)} "
            f"after {scale_text(event.scale_before)}; its state was not loaded. Each one "
            "searches for its scale again, and skips steps on the way.",
            cause="scaler_not_restored",
            evidence=event,
            fix=fixes.SCALER_STATE,
            part="skipped",
        )
    elif signs.resumed:
        step, before, after = signs.resumed
        yield Finding(
            "The scaler was not restored",
            f"When the run was resumed after step {step:,}, the scale went from "
            f"{scale_text(before)} to {scale_text(after)} without a growth. Save the scaler's "
            "state with the checkpoint, and load it on resume.",
            cause="scaler_not_restored",
            fix=fixes.SCALER_STATE,
            part="skipped",
        )


def _scaler_left_behind(signs: LoopSigns) -> Iterator[Finding]:
    if left := signs.one(events.ScalerLeftBehind):
        yield Finding(
            "The optimizer was restored, and its scaler was not",
            f"Before step {left.step:,} the state of {left.optimizer} was loaded, and that of its "
            f"GradScaler was not: it began at {scale_text(left.scale)}, and step "
            f"{left.skipped:,} was skipped. Each resume searches for the scale again. Save the "
            "scaler's state with the optimizer's, and load both.",
            cause="scaler_not_restored",
            evidence=left,
            fix=fixes.SCALER_STATE,
            part="skipped",
        )


def _rounded_state(signs: LoopSigns) -> Iterator[Finding]:
    if state := signs.one(events.RoundedState):
        yield Finding(
            "A loaded state has lost its second moments",
            f"Before step {state.step:,} {state.optimizer} has loaded a state in which exp_avg_sq "
            f"is 0 in {percent(state.count / state.of)} of the elements whose exp_avg is not: it "
            "was saved in half precision. Their next updates are far too large. Save the "
            "optimizer's state in fp32.",
            cause="state_rounded",
            evidence=state,
            fix=fixes.STATE,
        )


def _none_in(event: events.NoGradient) -> str:
    """Return the start of a sentence; at step 0 the scaler refused every step of the optimizer."""
    if not event.step:
        return "None"
    return f"In {quantity(event.steps, 'step')} up to step {event.step:,}, none"


def _gradients(signs: LoopSigns) -> Iterator[Finding]:
    for event in signs.several(events.NoGradient):
        is_all = event.count == event.of
        names = "" if is_all else f": {names_of(event.parameters)}"
        yield Finding(
            f"No parameter of {event.optimizer} received a gradient"
            if is_all
            else f"{event.count:,} parameters of {event.optimizer} receive no gradient",
            f"{_none_in(event)} of {'its' if is_all else 'these'} parameters received "
            f"a gradient{names}. The autograd graph does not reach them: detach, no_grad, .item() "
            "or a module that is not called. Rarely used experts may receive one later.",
            cause="no_gradient",
            evidence=event,
            fix=fixes.NO_GRADIENT,
            is_certain=is_all,
        )
    if (outside := signs.one(events.OutsideOptimizers)) and outside.count:
        yield Finding(
            f"{names_of(outside.parameters[:1])} is in no optimizer"
            if outside.count == 1
            else f"{outside.count:,} parameters with gradients are in no optimizer",
            f"Up to step {outside.step:,} no optimizer stepped {names_of(outside.parameters)}: "
            "they keep their values, and zero_grad() of an optimizer does not clear their "
            "gradients. A module that is added or replaced after the optimizer was created is not "
            "in it. If they should stay frozen, call requires_grad_(False), which saves their "
            "backward pass.",
        )
    has_none = any(event.count == event.of for event in signs.several(events.NoGradient))
    if signs.zero_steps >= ZERO_STEPS and not has_none:
        yield Finding(
            "All gradients are 0",
            f"In the last {signs.zero_steps:,} steps every gradient was exactly 0, so nothing is "
            "learned. The loss does not depend on the weights (a factor of 0, a clamp, dead "
            "units), or gradients are cleared between backward and step"
            + (
                f", or all gradients underflow at a scale of {scale_text(signs.scale)}."
                if signs.has_scaler and signs.scale is not None and signs.scale < 2**40
                else "; at this scale, underflow is not the cause."
                if signs.has_scaler
                else ", or all gradients are below 6e-8, which is 0 in fp16 without a GradScaler."
                if _computes_in_fp16(signs)
                else "."
            ),
            cause="zero_gradients",
            fix=fixes.ZERO_GRADIENTS,
        )


def _computes_in_fp16(signs: LoopSigns) -> bool:
    return any(event.dtype == "float16" for event in signs.several(events.Precision))


def _left_out(signs: LoopSigns) -> Iterator[Finding]:
    event = signs.one(events.NotStepped)
    if event and event.count >= LEFT_OUT:
        is_often = event.count >= OFTEN * event.step
        yield Finding(
            "The loop omits scaler.step()",
            f"scaler.update() was called {event.count:,} times without scaler.step() for any "
            f"optimizer, most recently at step {event.step:,}. Those steps were neither applied "
            "nor skipped by the scaler: the loop omitted them"
            f"{'' if is_often else ', perhaps on purpose'}.",
            cause="step_left_out",
            evidence=event,
            fix=fixes.STEP_LEFT_OUT,
            is_certain=is_often,
        )


def _find_dropped(signs: LoopSigns) -> Iterator[Finding]:
    event = signs.one(events.GradientsDropped)
    if event is None or signs.last >= event.step:
        return  # it has stepped since
    has_grown = signs.scale is not None and float(event.scale) > signs.scale
    cause = (
        f"That began when the scale had grown from {scale_text(signs.scale)} to "
        f"{scale_text(event.scale)}. Either the loop compares gradients, which are multiplied by "
        "it until unscale_, with a number that is not; or they are not finite at this scale, which "
        "only scaler.step() and scaler.update() lower."
        if has_grown and signs.scale is not None
        else "Where they are not finite, only scaler.step() and scaler.update() lower the scale."
    )
    yield Finding(
        "The loop drops its gradients",
        f"After step {signs.last:,} the loop cleared its gradients {event.count:,} times without "
        f"a step of an optimizer. {cause}",
        cause="scaled_gradients_compared" if has_grown else "step_left_out",
        evidence=event,
        fix=fixes.GRADIENTS_DROPPED,
        is_certain=has_grown,
    )


def _schedule(signs: LoopSigns) -> Iterator[Finding]:
    if event := signs.one(events.Schedule):
        matters = event.skipped >= OFTEN * max(event.step, signs.last)
        scheduler = event.scheduler or ""
        seen = f"{scheduler}.step() was called" if scheduler else "The learning rate changed"
        yield Finding(
            "The learning-rate schedule advances in skipped steps",
            f"{seen} after {event.advanced:,} of {event.skipped:,} skips, up to step "
            f"{event.step:,}: the schedule runs ahead of the weights, above all during warm-up"
            f"{'' if matters else ', which matters little in so few steps'}. "
            "Step it only if the scaler did not skip.",
            cause="schedule_in_skipped_steps",
            evidence=event,
            fix=fixes.SCHEDULE,
            is_certain=bool(scheduler) and matters,
        )


def _pointless_scaler(signs: LoopSigns) -> Iterator[Finding]:
    types = {event.dtype for event in signs.several(events.Precision)}
    if signs.has_scaler and types and types <= {"bfloat16", "float32"}:
        half = "bfloat16" in types
        yield Finding(
            f"The scaler does nothing for {'bf16' if half else 'fp32'}",
            "Matrix products are computed in "
            + ("bfloat16, which has the range of float32" if half else "float32")
            + ": gradients do not underflow and need no loss scale. "
            + (
                "Remove GradScaler." if half else "Use autocast with float16, or remove GradScaler."
            ),
            cause="scaler_without_fp16",
            fix=fixes.SCALER_WITHOUT_FP16,
            is_harmless=half,  # in fp32 the loop does not train as it seems to
        )
