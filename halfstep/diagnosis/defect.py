"""Defects that shadow steps find."""

from typing import Literal

from halfstep.telemetry.event_fields import Count, Finite, Part, SinceStep, StepNumber, Text

Kind = Literal[
    "overflow",
    "rounding",
    "undefined",
    "nonfinite_input",
    "nonfinite_weight",
    "carried",
    "scale_too_large",
    "loss_differs",
    "integers_differ",
    "gradients_underflow",
    "gradients_differ",
    "update_lost",
    "scaled_by_another",
    "scaled_gradients_compared",
    "scaled_gradients_edited",
    "scaled_gradients_in_loss",
    "scaled_gradients_kept",
    "gradients_not_scaled",
    "gradients_cleared_before_step",
    "gradients_edited_after_step",
    "stale_weight_cache",
    "no_half_operators",
    "overflow_without_effect",
    "scaled_value_read",
    "rejected",
    "kept_rounded",
]
Symptom = Literal["loss", "gradient", "weight", "value", "validation"]
Remedy = Literal["fp32", "bf16", "smaller_scale"]


#: Operators with a mask: a row of which nothing is left is NaN.
ATTENTIONS = ("_softmax", "_log_softmax", "_scaled_dot_product", "logsumexp")


class Site(Part, frozen=True, kw_only=True, omit_defaults=True):
    """An operator, and the line that called it.

    caller_file, caller_line: of the script, if the line is in an installed package.
    node: of the backward pass, as "MmBackward0".
    """

    operator: Text = ""
    file: Text = ""
    line: Count = 0
    caller_file: Text = ""
    caller_line: Count = 0
    source: Text = ""  # of the line
    module: Text = ""
    node: Text = ""
    variable: Text = ""


class Defect(Part, frozen=True, kw_only=True, omit_defaults=True):
    """One observation of an armed step.

    step: of a validation, the one before it.
    count, elements: how many elements of the site's result are affected, and of how many. Of
        gradients_underflow without a share: parameters all of whose gradients are 0.
    value: what the largest of them is in fp32.  limit: the largest number of the dtype.
    sample: an input of the site, and what it is in fp32.
    origin: where a value was rounded, or where a nonfinite tensor was made, or where
        autocast was entered, or which operator's result an overflow makes 0.
    loss, loss_fp32: of the step.  fits_below: the largest power of two that is a loss scale
        without the overflow.
    carried_from: the step in which a tensor became nonfinite.
    share: of the squared gradient norm that is lost, or the relative distance of the gradients.
    helps: what the shadow has shown to be finite.
    """

    step: StepNumber
    kind: Kind
    symptom: Symptom
    site: Site = Site()
    dtype: Text = ""
    count: Count = 0
    elements: Count = 0
    value: Finite | None = None
    limit: Finite | None = None
    sample: tuple[Finite, Finite] | None = None
    origin: Site | None = None
    rounded_in: Site | None = None  # where the input of the origin was rounded, if elsewhere
    is_infinite: bool = False  # of "undefined": from an infinity, such as a mask
    loss: Finite | None = None
    loss_fp32: Finite | None = None
    loss_repaired: Finite | None = None  # with the site's line in fp32
    are_gradients_finite: bool = False  # in fp32
    depends_on_scale: bool = False
    scale: Finite | None = None
    fits_below: Finite | None = None
    carried_from: SinceStep | None = None
    is_in_fp32: bool = False  # of "carried": its origin is not finite in fp32 either
    share: Finite | None = None
    error: Text = ""  # of "rejected": what the operator raised
    is_last: bool = False  # the loop ended in this step, before its backward pass
    has_grown: Finite | None = None  # factor by which the fp32 loss has grown since the beginning
    helps: tuple[Remedy, ...] = ()
