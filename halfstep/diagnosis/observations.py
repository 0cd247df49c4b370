"""Observations of all shadow steps, the gravest first."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from halfstep.diagnosis.defect import Defect, Kind, Site

#: Kinds of which one step may be a coincidence, or half precision as it always is.
NOTES: frozenset[Kind] = frozenset({"overflow_without_effect", "scaled_value_read"})
#: What follows from a scale that has fallen, from numbers that are not finite, and from edits.
CONSEQUENCES: frozenset[Kind] = frozenset({"gradients_underflow", "gradients_differ"})
NONFINITE: frozenset[Kind] = frozenset(
    {"overflow", "rounding", "undefined", "nonfinite_input", "nonfinite_weight", "carried"}
)
#: Kinds that explain skips and losses that are not finite.
EXPLAINING_SKIPS: frozenset[Kind] = NONFINITE | {"scale_too_large"}
OVERFLOWS: frozenset[Kind] = frozenset({"overflow", "scale_too_large"})
MILD: frozenset[Kind] = CONSEQUENCES | NOTES | {"update_lost"}
#: Kinds from which gradients of 0 follow.
ZEROING: frozenset[Kind] = NONFINITE | {"gradients_underflow"}
LATE: frozenset[Kind] = frozenset({"gradients_cleared_before_step", "gradients_edited_after_step"})
#: Kinds from which gradients that differ follow.
EXPLAINING: frozenset[Kind] = frozenset({"loss_differs", "gradients_underflow"})
EDITS: frozenset[Kind] = frozenset(
    {
        *("scaled_by_another", "scaled_gradients_compared"),
        *("scaled_gradients_edited", "scaled_gradients_in_loss", "gradients_not_scaled"),
        "scaled_gradients_kept",
    }
)
MOST_STEPS = 1000  # numbers kept of an observation
LAST_LOSSES = 3  # that have all grown, where the training diverges
#: A scale is at fault, and not the search for it, if it overflows so often without having fallen.
NOT_FALLING = 3
SLOWEST_FALL = 0.75  # of the scale from one overflow to the next step's
#: Steps with a mild symptom, of those observed, that make it a fault.
MILD_STEPS, MILD_SHARE = 3, 0.1
UNLOCATED_SHARE = 0.3  # the same, of a wrong loss without the line that makes it so


@dataclass
class Observation:
    """The same defect in one or more steps."""

    first: Defect  # or the worst one, of losses that differ
    steps: list[int] = field(default_factory=list)
    count: int = 0  # of all steps, also beyond MOST_STEPS
    not_falling: int = 0  # times that the scale overflowed again at the same or a larger number
    smallest_fit: float | None = None
    latest_scale: float | None = None
    carried: "Observation | None" = None  # how it goes on in later steps
    is_fault: bool = True

    @property
    def is_of_validation(self) -> bool:
        """Whether the training does not depend on it."""
        return self.first.symptom == "validation"

    @property
    def explains_skips(self) -> bool:
        """Whether skips and losses that are not finite follow from it."""
        return self.first.kind in EXPLAINING_SKIPS and not self.is_of_validation

    def add(self, defect: Defect) -> None:
        """Add a step."""
        self.count += 1
        is_attributed = bool(defect.site.operator)
        if is_attributed > bool(self.first.site.operator):  # only now
            self.first = defect
        elif (
            defect.kind == "loss_differs"
            and is_attributed == bool(self.first.site.operator)
            and self.first.loss_repaired is None  # else that one says how the loss becomes right
        ):
            self.first = max(self.first, defect, key=_distance)
        if len(self.steps) < MOST_STEPS:
            self.steps.append(defect.step)
        if defect.fits_below is not None:
            fits = defect.fits_below
            self.smallest_fit = fits if self.smallest_fit is None else min(self.smallest_fit, fits)
        if defect.scale is not None:
            if self.latest_scale is not None:
                is_next = len(self.steps) > 1 and defect.step == self.steps[-2] + 1
                limit = SLOWEST_FALL if is_next else 1.0
                self.not_falling += defect.scale >= limit * self.latest_scale
            self.latest_scale = defect.scale


def _distance(defect: Defect) -> float:
    """Return how far a loss is from its value in fp32, relative to that."""
    loss, loss_fp32 = defect.loss or 0.0, defect.loss_fp32 or 0.0
    return abs(loss - loss_fp32) / abs(loss_fp32) if loss_fp32 else math.inf


class Observations:
    """Collects defects in the order of steps."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Kind, str, Site | int | None], Observation] = {}
        self._grown: Defect | None = None  # the first one of a loss that had grown

    def add(self, defects: Sequence[Defect]) -> None:
        """Add what a step has shown."""
        for defect in defects:
            group = self._groups.setdefault(_key(defect), Observation(defect))
            group.add(defect)
            if defect.has_grown is not None and self._grown is None:
                self._grown = defect

    def found(self, armed_steps: int) -> list[Observation]:
        """Return all observations: faults, the gravest and the earliest first, then notes.

        armed_steps: those that ran with their shadows.
        """
        for group in self._groups.values():
            self._add_growth(group)
        groups = _link_inputs(list(self._groups.values()))
        faults = [
            group
            for group in groups
            if group.first.kind in (*NONFINITE, *EDITS) and not group.is_of_validation
        ]
        first_lost = min((fault.steps[0] for fault in faults), default=None)
        for group in groups:
            group.is_fault = _is_fault(group, armed_steps, first_lost)
        if any(group.is_fault and group.first.kind in EXPLAINING for group in groups):
            for group in groups:
                group.is_fault &= group.first.kind != "gradients_differ"
        updates = {group.first.site for group in groups if group.first.kind == "update_lost"}
        for group in groups:  # the wrong loss follows from the update
            group.is_fault &= not (
                group.first.kind == "loss_differs" and group.first.site in updates
            )
        sites = {group.first.site for group in groups if group.is_fault}
        merged = [
            group
            for group in groups
            if not (_joins(group, groups) or (not group.is_fault and group.first.site in sites))
        ]
        return sorted(merged, key=_gravity)

    def _add_growth(self, group: Observation) -> None:
        """Add the growth of the loss to an overflow that came with it, before it was known."""
        first, grown = group.first, self._grown
        if grown is None or first.has_grown is not None or first.kind not in OVERFLOWS:
            return
        if 0 <= grown.step - first.step < LAST_LOSSES:
            group.first = structs.replace(first, has_grown=grown.has_grown)


def _link_inputs(groups: list[Observation]) -> list[Observation]:
    """Join nonfinite inputs to an overflow without effect of the same step, or the one before.

    The loop may have kept what overflowed where no operator shows it, as in an array of NumPy.
    """
    inputs = [group for group in groups if group.first.kind == "nonfinite_input"]
    linked = []
    for group in groups:
        is_note = group.first.kind == "overflow_without_effect"
        effects = [i for i in inputs if is_note and {i.steps[0] - 1, i.steps[0]} & {*group.steps}]
        if effects:
            inputs.remove(effects[0])
            overflow = structs.replace(group.first, kind="overflow")
            group = replace(group, first=overflow, carried=effects[0])
        linked.append(group)
    joined = [group.carried for group in linked if group.first.kind == "overflow"]
    return [group for group in linked if group not in joined]


def _gravity(observation: Observation) -> tuple[bool, bool, int, bool, bool]:
    """Return the order of observations: faults, of them what is not finite, by the first step.

    What overflows by inputs that are wrong, as it is within the range in fp32, comes after other
    defects of that step, and a mistake with scaled gradients before them.
    """
    first, kind = observation.first, observation.first.kind
    is_in_range = first.value is not None and first.limit is not None and first.value < first.limit
    follows = kind == "overflow" and is_in_range
    return not observation.is_fault, kind in MILD, observation.steps[0], follows, kind not in EDITS


def _key(defect: Defect) -> tuple[Kind, str, Site | int | None]:
    """Return what makes two defects the same."""
    # Which of their sites is first is chance.
    if defect.kind in ("scale_too_large", "gradients_underflow", "stale_weight_cache"):
        return defect.kind, "", None
    if defect.kind == "loss_differs" and defect.value is None:
        return defect.kind, "", None
    if defect.kind == "carried":
        return defect.kind, "", defect.carried_from
    return defect.kind, defect.symptom, defect.site


def _is_fault(group: Observation, armed_steps: int, first_lost: int | None) -> bool:
    kind, step = group.first.kind, group.steps[0]
    if kind in NOTES:
        return False
    if kind == "scale_too_large":
        return group.not_falling >= max(NOT_FALLING, MILD_SHARE * armed_steps)
    if kind in CONSEQUENCES:
        return _is_frequent(group, armed_steps) and (first_lost is None or step < first_lost)
    if kind == "loss_differs":
        is_located = bool(group.first.site.operator)
        is_often = is_located or group.count >= UNLOCATED_SHARE * armed_steps
        is_lasting = group.first.value is not None or _is_frequent(group, armed_steps)
        return is_often and is_lasting and (first_lost is None or step <= first_lost)
    if kind in ("update_lost", "integers_differ", *LATE):
        return _is_frequent(group, armed_steps)
    return True


def _is_frequent(group: Observation, armed_steps: int) -> bool:
    return group.count >= min(armed_steps, max(MILD_STEPS, MILD_SHARE * armed_steps))


def _joins(group: Observation, groups: Sequence[Observation]) -> bool:
    """Add a tensor that stays nonfinite to the observation of how it came to be; return if so.

    That is the one of the operator that made it, or else any that was nonfinite in that step.
    """
    defect = group.first
    if defect.kind != "carried" or defect.origin is None:
        return False
    before = [
        other
        for other in groups
        if other is not group
        and other.first.kind in NONFINITE
        and not other.is_of_validation
        and defect.carried_from in other.steps
    ]
    for other in before:
        if defect.origin in (other.first.site, other.first.origin):
            other.carried = group
            return True
    for other in before:
        other.carried = other.carried or group
    return bool(before)
