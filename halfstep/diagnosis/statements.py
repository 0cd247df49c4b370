"""Observations of shadow steps in words: what was seen, and what removes it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from halfstep.diagnosis.defect import ATTENTIONS, Defect, Kind, Site
from halfstep.diagnosis.observations import Observation
from halfstep.number_formats import number, percent, quantity
from halfstep.number_formats import scale as scale_text

STEPS_SHOWN = 5
RIGHT_LOSS = 0.01  # distance from fp32, relative to it, up to which a loss is right
DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
TITLES: Mapping[Kind, str] = {
    "overflow": "Overflow of {dtype}",
    "rounding": "A value is rounded away in {dtype}",
    "undefined": "Undefined in every precision",
    "nonfinite_input": "{variable} is not finite",
    "nonfinite_weight": "{variable} is not finite",
    "carried": "{variable} stays not finite",
    "scale_too_large": "The loss scale is too large and does not fall",
    "loss_differs": "The loss is finite and wrong",
    "integers_differ": "Integers are computed in {dtype}",
    "gradients_underflow": "Gradients underflow",
    "gradients_differ": "Gradients differ from fp32",
    "update_lost": "An update is rounded away",
    "scaled_by_another": "A loss is scaled by another scaler",
    "scaled_gradients_compared": "A comparison depends on the loss scale",
    "scaled_gradients_edited": "Gradients are edited while they are scaled",
    "scaled_gradients_in_loss": "Scaled values are part of the loss",
    "scaled_gradients_kept": "A state is computed from scaled gradients",
    "gradients_not_scaled": "A gradient is not multiplied by the loss scale",
    "gradients_cleared_before_step": "Gradients are cleared before the step",
    "gradients_edited_after_step": "Gradients are edited without effect",
    "stale_weight_cache": "Autocast computes with weights from before they changed",
    "no_half_operators": "Nothing runs in half precision",
    "overflow_without_effect": "Overflow of {dtype} without effect",
    "scaled_value_read": "A number that is read is still scaled",
    "kept_rounded": "A tensor that is kept is far from fp32",
    "rejected": "An operator rejects what half precision has computed",
}
IN_FP32 = "Compute it in fp32: under torch.autocast(device, enabled=False), from .float() inputs."
ADVICE: Mapping[Kind, str] = {
    "undefined": "Avoid the undefined case: a division by 0, a logarithm or root of 0, a mean over "
    "no elements. Neither precision nor loss scale helps.",
    "nonfinite_input": "If it is data, find such samples, and drop or mask them. If an earlier "
    "step has computed it, such as a statistic or a priority, look there.",
    "nonfinite_weight": "An earlier step or the checkpoint has made it so, or it was so from the "
    "start. Start from finite weights; let nothing be written to a running statistic in a step "
    "that overflows.",
    "carried": "Reset it, and let nothing be written to it in a step that is skipped.",
    "scale_too_large": "Let the scaler find its scale: one scaler for the whole training, restored "
    "on resume, without a minimum.",
    "integers_differ": "Keep such numbers as integers or in fp32.",
    "gradients_underflow": "Use a GradScaler, a larger initial scale, or bf16.",
    "gradients_differ": "Compare the precisions by module with halfstep.precision_diff.",
    "update_lost": "Keep weights and averages in fp32; autocast computes in half precision all the "
    "same.",
    "scaled_by_another": "Scale it with the scaler that steps the optimizer of these weights.",
    "scaled_gradients_compared": "Call scaler.unscale_(optimizer) before it.",
    "scaled_gradients_edited": "Call scaler.unscale_(optimizer) before it.",
    "scaled_gradients_in_loss": "Divide them by scaler.get_scale(), and scale a loss only once.",
    "scaled_gradients_kept": "Call scaler.unscale_(optimizer) before it, or divide the gradients "
    "by scaler.get_scale().",
    "gradients_not_scaled": "Multiply it by grad_output, in the backward of the custom Function "
    "that makes it.",
    "gradients_cleared_before_step": "Clear them before the first backward pass of a step.",
    "gradients_edited_after_step": "Edit or clip the gradients that the optimizer steps with, "
    "before the step and after scaler.unscale_: of copies in fp32, not of the model.",
    "stale_weight_cache": "Leave the region of autocast before weights change, and enter it again: "
    "in each step, around the forward pass and the loss only. Or pass cache_enabled=False.",
    "no_half_operators": "Run the forward pass under torch.autocast, or remove the scaler.",
    "overflow_without_effect": "",
    "scaled_value_read": "If it is logged, or compared with a number, divide it by the loss scale.",
    "kept_rounded": "Compute it in fp32, from inputs in fp32, and cast the result.",
    "rejected": "Compute it in fp32, or clamp it to what is accepted.",
}
IN_THE_UPDATE = (
    "Keep the weights in fp32, and run the forward pass under autocast; or raise the optimizer's "
    "eps, which half precision rounds to 0."
)
MASKED = "Leave out rows that are masked as a whole, or mask them with a finite number."
BEYOND_FP32 = (
    "No precision has the range: keep the values smaller before it, by a lower learning rate, a "
    "clip of the gradients, a norm or a clamp."
)
LEFT_OVER = (
    "If a step has written it, reset it, and let nothing be written to it in a skipped step. "
    "If it is data that was loaded ahead, find such samples and drop them."
)
DIVERGED = "Lower the learning rate, warm it up or clip the gradients."


@dataclass(frozen=True)
class Statement:
    """An observation in words. title: without the place.  text: whole sentences."""

    title: str
    text: str
    advice: str


def statement_of(observation: Observation) -> Statement:
    """Return an observation in words."""
    defect = observation.first
    is_number = defect.kind == "nonfinite_input" and not defect.count
    variable = defect.site.variable or ("A number" if is_number else "A tensor")
    title = TITLES[defect.kind].format(dtype=_dtype(defect), variable=variable)
    if defect.kind == "scale_too_large" and not observation.is_fault:
        title = "The scaler searches for its scale"
    if defect.kind == "nonfinite_input" and defect.value is not None:
        title = f"{variable} holds numbers too large for any precision"
    if observation.is_of_validation:
        title += " in a validation"
    if is_loss_right(defect):
        title = f"Gradients are lost in {_dtype(defect)}"
    if is_left_over(defect):
        title = f"{variable} was not finite before the step"
    text, advice = _text(observation), _advice(observation)
    if defect.has_grown is not None:
        growth = number(defect.has_grown, 2)
        text += f" Before that, the loss in fp32 had grown {growth}-fold: the training diverges."
        advice = DIVERGED
    if defect.is_last:
        text += " The loop ended in this step."
    if observation.carried is not None:
        text += f" {_returns(observation.carried)}"
        if observation.carried.first.kind == "nonfinite_input":  # which may have another source
            advice = f"{advice} {ADVICE['nonfinite_input']}"
    return Statement(title, text, advice)


def text_of(defect: Defect) -> str:
    """Return what one step has shown in words."""
    observation = Observation(defect)
    observation.add(defect)
    return statement_of(observation).text


def is_left_over(defect: Defect) -> bool:
    """Return whether a step that was not observed has left a tensor nonfinite, or loaded it so."""
    return defect.kind == "carried" and defect.origin is None


def steps_of(observation: Observation) -> str:
    """Return the steps of an observation: "In step 4", "In 12 steps, the first ones 4, 8"."""
    shown = [f"{step:,}" for step in observation.steps[:STEPS_SHOWN]]
    if observation.count == 1:
        return f"In step {shown[0]}"
    if observation.count <= STEPS_SHOWN:
        return f"In steps {', '.join(shown[:-1])} and {shown[-1]}"
    return f"In {observation.count:,} steps, the first ones {', '.join(shown)},"


def _when(defect: Defect) -> str:
    """Return the step of a defect: "In step 4", "In a validation after step 4"."""
    if defect.symptom == "validation":
        return f"In a validation after step {defect.step:,}"
    return f"In step {defect.step:,}"


def _in_step(observation: Observation) -> str:
    """Return the step of the values that are stated, if there are others."""
    return "" if observation.count == 1 else f"in step {observation.first.step:,} "


def place_of(site: Site) -> str:
    """Return the line of a site: "model.py:94", with that of the script if it is in a package."""
    if not site.line:
        return ""
    place = f"{PurePath(site.file).name}:{site.line}"
    if site.caller_line:
        place += f", called at {PurePath(site.caller_file).name}:{site.caller_line}"
    return place


def named(site: Site) -> str:
    """Return a site in words: "`self.wo(h)` (model.py:94, decoder.block.1)"."""
    what = f"`{site.source}`" if site.source else site.operator
    if site.node:
        what = f"the gradient of {what}"
    where = ", ".join(filter(None, (place_of(site), site.module)))
    return f"{what} ({where})" if where else what


def _overflow(observation: Observation) -> str:
    defect = observation.first
    text = f"{_when(defect)} {named(defect.site)} {_beyond(defect)}{_in_fp32(defect)}."
    if defect.symptom == "weight" and defect.origin is not None:
        text += f" By it {named(defect.origin)} is 0, and so is the update of a weight."
    return text


def _rounding(observation: Observation) -> str:
    defect = observation.first
    text = f"{_when(defect)} {named(defect.site)} is not finite in {_dtype(defect)}: "
    if defect.sample is not None:
        actual, exact = defect.sample
        text += f"its input is {number(actual)}, which is {number(exact, 8)} in fp32"
    elif defect.value is None and defect.origin is not None:
        return (
            f"{text}a 0 was drawn at random in {_dtype(defect)}, which has few numbers, in "
            f"{named(defect.origin)}{_in_fp32(defect)}."
        )
    else:
        text += f"a value that is {number(defect.value)} in fp32 becomes 0 by rounding"
    if defect.origin is not None and named(defect.origin) != named(defect.site):
        text += f" in {named(defect.origin)}"
    if defect.rounded_in is not None:
        text += f"; {named(defect.rounded_in)} is rounded"
    return f"{text}{_in_fp32(defect)}."


def _describe_undefined(observation: Observation) -> str:
    defect = observation.first
    text = f"In step {defect.step:,} {named(defect.site)} is not finite; nor is it in fp32"
    if defect.is_infinite and defect.origin is not None:
        text += f". An infinity comes from {named(defect.origin)}"
        text += ", and a row holds nothing else" if _is_mask(defect) else ""
    is_after = defect.symptom == "gradient" and defect.loss is not None
    return f"{text}. The loss was finite." if is_after else f"{text}."


def _nonfinite_input(observation: Observation) -> str:
    defect = observation.first
    variable = defect.site.variable
    if defect.value is not None and defect.origin is not None:
        return (
            f"{f'`{variable}`' if variable else 'A tensor'} holds numbers up to "
            f"{number(defect.value)} where it comes into step {defect.step:,}, in "
            f"{named(defect.site)}; {named(defect.origin)} is then beyond fp32's "
            f"{number(defect.limit)}."
        )
    if not defect.count:
        return (
            f"A number of Python is NaN when step {defect.step:,} uses it, in {named(defect.site)}."
        )
    are = "is" if defect.count == 1 else "are"
    return (
        f"{f'`{variable}`' if variable else 'A tensor'} holds "
        f"{quantity(defect.count, 'element')} that {are} NaN or infinite where it comes into "
        f"step {defect.step:,}, in {named(defect.site)}."
    )


def _describe_carried(observation: Observation) -> str:
    origin = observation.first.origin
    as_well = ", in fp32 as well" if observation.first.is_in_fp32 else ""
    text = _returns(observation)
    return f"{text} It became so in {named(origin)}{as_well}." if origin else text


def _returns(observation: Observation) -> str:
    """Return when a tensor became nonfinite, and where it comes back in."""
    defect = observation.first
    if defect.kind == "nonfinite_input":
        return f"{_nonfinite_input(observation)} It may come from there."
    variable, place = defect.site.variable, place_of(defect.site)
    if is_left_over(defect):
        return (
            f"{f'`{variable}`' if variable else 'A tensor'} held NaN when step {defect.step:,} "
            f"began, in which it is used in {named(defect.site)}. From step "
            f"{defect.carried_from:,} to it, each step was skipped."
        )
    return (
        f"{f'`{variable}`' if variable else 'A tensor'} has not been finite since step "
        f"{defect.carried_from:,}. {steps_of(observation)} it comes back in"
        f"{f' at {place}' if place else ''}."
    )


def _scale_too_large(observation: Observation) -> str:
    defect = observation.first
    return (
        f"{steps_of(observation)} gradients overflow at the loss scale: {_in_step(observation)}"
        f"at {scale_text(defect.scale)} {named(defect.site)} {_beyond(defect)}. They fit at a "
        f"scale of {scale_text(observation.smallest_fit)} or less."
    )


def _loss_differs(observation: Observation) -> str:
    defect = observation.first
    text = (
        f"{steps_of(observation)} the loss is far from its value in fp32: "
        f"{_in_step(observation)}it is {number(defect.loss)} instead of "
        f"{number(defect.loss_fp32)}."
    )
    if is_loss_right(defect):
        text = f"{steps_of(observation)} the loss is as in fp32, and gradients are not."
    if not defect.site.operator:
        return f"{text} No value was lost as a whole, and no line was found that removes the error."
    if defect.value is None:
        repaired = number(defect.loss_repaired)
        return f"{text} With {named(defect.site)} in fp32, from the same inputs, it is {repaired}."
    if defect.value > (defect.limit or 0.0) / 2:
        return f"{text} Half precision first loses {named(defect.site)}, which {_beyond(defect)}."
    where = named(defect.origin or defect.site)
    return (
        f"{text} A value that is {number(defect.value)} in fp32 becomes 0 by rounding in {where}."
    )


def _integers_differ(observation: Observation) -> str:
    defect = observation.first
    share, dtype = percent(defect.share), _dtype(defect)
    if defect.origin is None:
        text = f"{named(defect.site)} makes integers from {dtype} that are others in fp32: {share}"
    else:
        text = f"{named(defect.site)} rounds to {dtype} what {named(defect.origin)} makes integers "
        text += f"from. They are others in fp32: {share}"
    return f"{steps_of(observation)} {text} of them in step {defect.step:,}."


def _kept_rounded(observation: Observation) -> str:
    defect = observation.first
    text = f"In step {defect.step:,} {named(defect.site)} is rounded to {_dtype(defect)}"
    made = "It is a tensor"
    if defect.origin is not None:
        made = f"{named(defect.origin)} makes a tensor of it"
    return (
        f"{text}. {made} that later steps use, {percent(defect.share)} of its norm from its value "
        "in fp32."
    )


def _scaled_value_read(observation: Observation) -> str:
    defect = observation.first
    value, scale = defect.value or 0.0, defect.scale or 1.0
    return (
        f"{steps_of(observation)} {named(defect.site)} reads a number that is multiplied by the "
        f"loss scale: {_in_step(observation)}it is {number(value)}, and {number(value / scale)} "
        f"without the scale of {scale_text(scale)}."
    )


def _rejected(observation: Observation) -> str:
    defect = observation.first
    value, value_fp32 = defect.sample or (None, None)
    operator = "An operator" if defect.origin is None else named(defect.origin)
    return (
        f"In step {defect.step:,} {named(defect.site)} gives {number(value, 7)}, which is "
        f'{number(value_fp32, 7)} in fp32. {operator} rejected it: "{defect.error}". With the '
        "values of fp32 it does not."
    )


def is_loss_right(defect: Defect) -> bool:
    """Return whether only the gradients of a step with a wrong loss are wrong."""
    loss, loss_fp32 = defect.loss or 0.0, defect.loss_fp32 or 0.0
    return defect.kind == "loss_differs" and abs(loss - loss_fp32) <= RIGHT_LOSS * abs(loss_fp32)


def _gradients_underflow(observation: Observation) -> str:
    defect = observation.first
    at = f" at a scale of {scale_text(defect.scale)}" if defect.scale not in (None, 1.0) else ""
    if defect.count:
        which = f"all gradients of {defect.count:,} of {quantity(defect.elements, 'parameter')}"
        text = f"{steps_of(observation)} {which} are 0 in half precision, and not in fp32."
    else:
        text = (
            f"{steps_of(observation)} gradients are 0 in half precision that are not 0 in fp32: "
            f"{_in_step(observation)}{percent(defect.share)} of the squared norm{at}."
        )
    if defect.site.line:
        text += f" Most of them become so in {named(defect.site)}"
        text += ", whatever the scale is." if defect.helps else "."
    return text


_TEXTS: Mapping[Kind, Callable[[Observation], str] | str] = {
    "overflow": _overflow,
    "rounding": _rounding,
    "undefined": _describe_undefined,
    "nonfinite_input": _nonfinite_input,
    "nonfinite_weight": _nonfinite_input,
    "carried": _describe_carried,
    "scale_too_large": _scale_too_large,
    "loss_differs": _loss_differs,
    "integers_differ": _integers_differ,
    "gradients_underflow": _gradients_underflow,
    "gradients_differ": "{steps} the gradients are far from their values in fp32: "
    "{in_step}by {share} of their norm.",
    "update_lost": "{steps} {line} changes a tensor in {dtype} by so little that at least half of "
    "the change is rounded away.{cast}",
    "scaled_by_another": "{steps} {line} scales a loss, and another scaler, of another scale, "
    "unscales its gradients: they count too much or too little.",
    "scaled_gradients_compared": "{steps} {line} compares gradients that are still multiplied by "
    "the loss scale, {scale} in step {step:,}, with what is not. With another scale it may decide "
    "otherwise.",
    "scaled_gradients_edited": "{steps} {line} computes with gradients that are still multiplied "
    "by the loss scale, {scale} in step {step:,}. What the optimizer gets is no longer "
    "proportional to it.",
    "scaled_gradients_in_loss": "{steps} the loss, in {line}, is computed from values that are "
    "still multiplied by the loss scale.",
    "scaled_gradients_kept": "{steps} {line} writes what it computes from gradients that are still "
    "multiplied by the loss scale, {scale} in step {step:,}, to a tensor that outlives the step. "
    "With another scale it would hold other values.",
    "gradients_not_scaled": "{steps} {line} does not depend on the gradient that comes in, and so "
    "not on the loss scale, {scale} in step {step:,}. Unscaling divides it all the same: it counts "
    "too little by that factor.",
    "gradients_cleared_before_step": "{steps} {line} sets all gradients to 0 between the backward "
    "pass and the step: no weight moves.",
    "gradients_edited_after_step": "{steps} {line} changes gradients, and they are cleared before "
    "a step uses them: it has no effect.",
    "stale_weight_cache": "{steps} {line} uses weights in half precision that have changed since: "
    "autocast keeps them as they were at their first use, until {origin} is left.",
    "no_half_operators": "A GradScaler is used, and no operator of the forward pass ran in fp16 or "
    "bf16.",
    "overflow_without_effect": "{steps} {line} {beyond}. No operator passes it on to "
    "the loss or to a gradient.",
    "scaled_value_read": _scaled_value_read,
    "kept_rounded": _kept_rounded,
    "rejected": _rejected,
}


def _text(observation: Observation) -> str:
    """Return what was seen, as whole sentences."""
    defect = observation.first
    text = _TEXTS[defect.kind]
    if not isinstance(text, str):
        return text(observation)
    return text.format(
        steps=steps_of(observation),
        line=named(defect.site),
        step=defect.step,
        in_step=_in_step(observation),
        dtype=_dtype(defect),
        scale=scale_text(defect.scale),
        share=percent(defect.share),
        beyond=_beyond(defect),
        origin="it" if defect.origin is None else named(defect.origin),
        cast=f" It is in {_dtype(defect)} since {named(defect.origin)}." if defect.origin else "",
    )


def _dtype(defect: Defect) -> str:
    return DTYPES.get(defect.dtype, defect.dtype)


def _beyond(defect: Defect) -> str:
    """Return how far a value is out of range: "is 1.59e6, beyond fp16's 65,504"."""
    if defect.value is None or defect.limit is None:
        return f"is not finite in {_dtype(defect)}, and is in fp32"
    if defect.value <= defect.limit:  # a sum within it is larger, or a rounding
        exact = "fp64" if defect.dtype == "float32" else "fp32"
        return f"is not finite in {_dtype(defect)}, and {number(defect.value)} in {exact}"
    return f"is {number(defect.value)}, beyond {_dtype(defect)}'s {number(defect.limit)}"


def _in_fp32(defect: Defect) -> str:
    """Return what the step would be in fp32, as the end of a sentence; "" if that is no better."""
    if defect.loss_fp32 is None or "fp32" not in defect.helps:
        return ""
    text = f"; in fp32 this step's loss is {number(defect.loss_fp32)}"
    return f"{text} and all gradients are finite" if defect.are_gradients_finite else text


def _is_mask(defect: Defect) -> bool:
    return defect.is_infinite and defect.site.operator.startswith(ATTENTIONS)


def _advice(observation: Observation) -> str:
    """Return what the shadow has shown to help, or what removes the mistake."""
    defect = observation.first
    if _is_mask(defect):
        return MASKED
    if is_left_over(defect):
        return LEFT_OVER
    if defect.kind == "scale_too_large" and not observation.is_fault:
        return ""
    if defect.kind == "overflow" and defect.dtype == "float32":
        return BEYOND_FP32
    if defect.kind == "carried" and defect.is_in_fp32:
        return f"{ADVICE['undefined']} {ADVICE['carried']}"
    if defect.kind in ADVICE and not (defect.kind == "gradients_underflow" and defect.helps):
        return ADVICE[defect.kind]
    if "fp32" not in defect.helps:
        return ""
    if defect.kind == "rounding" and defect.symptom == "weight":
        return IN_THE_UPDATE
    advice = IN_FP32
    if "bf16" in defect.helps:
        advice += " Or use bf16, which has the range."
    elif defect.kind == "rounding":
        advice += " Or use a constant that is not rounded to 0 or 1 there."
    return advice
