"""Observations and mistakes as rows of a report. This module imports torch."""

import os
from collections.abc import Sequence

from halfstep.check.calls import Mistake
from halfstep.check.report import Row
from halfstep.diagnosis.defect import Defect, Site
from halfstep.diagnosis.finding import Finding
from halfstep.diagnosis.observations import ZEROING, Observation
from halfstep.diagnosis.statements import statement_of
from halfstep.shadow.operations import Place

STEPS_LISTED = 100


def rows_of(
    calls: Sequence[Mistake], observations: Sequence[Observation], others: Sequence[Mistake]
) -> list[Row]:
    """Return all as rows, faults first.

    calls: mistakes that explain others.  others: that explain nothing; gradients of 0 follow from
    a fault of the numbers.
    """
    faults = {observation.first.kind for observation in observations if observation.is_fault}
    explained = {"zero_gradients"} if faults & ZEROING else set()
    if "scaled_gradients_compared" in faults:  # and the loop then does not step
        explained.add("no_optimizer_step")
    if any(finding.cause == "gradients_not_cleared" for finding, _place in calls):
        observations = [each for each in observations if not _is_gradient_left_over(each)]
    rows = [
        *(row_of_call(*call) for call in calls if call[0].cause not in explained),
        *map(row_of, observations),
        *(row_of_call(*other) for other in others if other[0].cause not in explained),
    ]
    return sorted(rows, key=lambda row: not row.is_fault)


def _is_gradient_left_over(observation: Observation) -> bool:
    """Return whether a gradient of an earlier step has made a gradient nonfinite."""
    return observation.first.kind == "carried" and observation.first.symptom == "gradient"


def row_of(observation: Observation) -> Row:
    """Return an observation as a row."""
    defect, statement = observation.first, statement_of(observation)
    site = _find_site(defect)
    return Row(
        kind=defect.kind,
        is_fault=observation.is_fault,
        title=statement.title,
        text=statement.text,
        advice=statement.advice,
        file=relative(site.caller_file or site.file),
        line=site.caller_line or site.line,
        source=site.source,
        operator=site.operator,
        module=site.module,
        is_backward=bool(site.node),
        symptom=defect.symptom,
        dtype=defect.dtype,
        value=defect.value,
        limit=defect.limit,
        fits_below=observation.smallest_fit,
        share=defect.share,
        loss=defect.loss,
        loss_fp32=defect.loss_fp32,
        elements=(defect.count, defect.elements),
        step=defect.step,
        steps=observation.steps[:STEPS_LISTED],
        count=observation.count,
    )


def row_of_call(finding: Finding, place: Place) -> Row:
    """Return a mistake in the calls of the loop as a row. place: of the call that showed it."""
    return Row(
        kind=finding.cause or "calls",
        is_fault=finding.is_certain_fault,
        title=finding.title,
        text=finding.text,
        fix=finding.fix,
        file=relative(place.caller_file or place.file),
        line=place.caller_line or place.line,
        source=place.source(),
    )


def _find_site(defect: Defect) -> Site:
    """Return the line to change: where a value was rounded, else where it became nonfinite."""
    has_origin = defect.kind == "rounding" and defect.origin and defect.origin.line
    return defect.origin if has_origin and defect.origin else defect.site


def relative(file: str) -> str:
    """Return a path below the working directory without it."""
    path = os.path.relpath(file) if file else ""
    return file if path.startswith("..") else path
