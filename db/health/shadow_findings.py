"""Findings of armed steps, which ran once more in fp32."""

from collections.abc import Iterator, Mapping, Sequence

from halfstep.diagnosis import fixes
from halfstep.diagnosis.defect import Defect, Kind
from halfstep.diagnosis.finding import OF_VALIDATION, Finding
from halfstep.diagnosis.observations import MILD, Observation, Observations
from halfstep.diagnosis.statements import is_left_over, statement_of
from halfstep.telemetry.events import ShadowStep

#: Kinds in which a training that diverges ends.
DIVERGING: frozenset[Kind] = frozenset({"overflow", "rounding", "undefined", "scale_too_large"})
#: Kinds that follow from weights that are not finite.
BY_WEIGHTS: frozenset[Kind] = frozenset({"nonfinite_input", "nonfinite_weight", "carried"})
#: Kinds whose cause has another name, as older events have it.
CAUSES: Mapping[Kind, str] = {
    "nonfinite_input": "nonfinite_inputs",
    "nonfinite_weight": "",  # what made it so is not known
    "scale_too_large": "backward_overflow",
}
FIXES: Mapping[str, str] = {
    "forward_overflow": fixes.FORWARD,
    OF_VALIDATION: fixes.FORWARD,
    "backward_overflow": fixes.BACKWARD,
    "singular_gradient": fixes.SINGULAR,
    "nonfinite_inputs": fixes.INPUTS,
}
#: Of fewer armed steps, what is not always a fault is none.
FEWEST_STEPS = 3


def observe(steps: Sequence[ShadowStep], lost_at: int | None) -> list[Observation]:
    """Return the faults that armed steps have shown, the gravest first.

    lost_at: the step that made the weights nonfinite, which explains later nonfinite values.
    """
    observations = Observations()
    for event in sorted(steps, key=lambda event: event.step):
        is_later = lost_at is not None and event.step > lost_at
        observations.add([d for d in event.defects if not (is_later and d.kind in BY_WEIGHTS)])
    armed = max((event.armed for event in steps), default=0)
    return [
        observation
        for observation in observations.found(max(armed, FEWEST_STEPS))
        if observation.is_fault
    ]


def first_step(steps: Sequence[ShadowStep]) -> int | None:
    """Return the first step that has shown what explains skips."""
    found = (observation for observation in observe(steps, None) if observation.explains_skips)
    return min((observation.steps[0] for observation in found), default=None)


def explaining(observations: Sequence[Observation], growth: str) -> Iterator[Finding]:
    """Yield what explains skipped steps and losses that are not finite.

    growth: a sentence on the growth of the loss before them, or "".
    """
    for observation in observations:
        if observation.explains_skips:
            yield finding_of(observation, growth if observation.first.kind in DIVERGING else "")


def others(observations: Sequence[Observation], *, are_mild: bool) -> Iterator[Finding]:
    """Yield faults that explain no skipped step.

    are_mild: those that other mistakes may explain.
    """
    for observation in observations:
        is_mild = observation.first.kind in MILD
        if not observation.explains_skips and is_mild == are_mild:
            yield finding_of(observation)


def finding_of(observation: Observation, growth: str = "") -> Finding:
    """Return an observation as a finding. growth: of a loss that diverged before."""
    defect, statement = observation.first, statement_of(observation)
    cause = cause_of(defect)
    if growth:
        return Finding(
            statement.title,
            f"{statement.text} {growth}",
            before=observation.steps[0],
            remedies=("lower_rate",),
            part="skipped",
            cause=cause,
            fix=fixes.DIVERGED,
        )
    return Finding(
        statement.title,
        f"{statement.text} {statement.advice}".strip(),
        before=observation.steps[0],
        remedies=("bf16",) if "bf16" in defect.helps else (),
        part="skipped" if observation.explains_skips else "",
        cause=cause,
        fix=FIXES.get(cause, ""),
        is_fault=True,
        is_certain=not is_left_over(defect),
    )


def cause_of(defect: Defect) -> str:
    """Return the name of a defect's cause: its section in docs/reference/diagnosis.md."""
    if defect.symptom == "validation":
        return OF_VALIDATION
    is_backward = bool(defect.site.node) or defect.symptom == "gradient"
    if defect.kind == "undefined" or (defect.kind == "overflow" and defect.dtype == "float32"):
        return "singular_gradient" if is_backward else "undefined_forward"
    if defect.kind == "overflow":
        return "backward_overflow" if defect.site.node else "forward_overflow"
    return CAUSES.get(defect.kind, defect.kind)
