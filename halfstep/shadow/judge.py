"""Defects of a shadow step, from its losses, gradients and weights. This module imports torch."""

import math
from collections.abc import Iterable, Sequence

from msgspec.structs import replace
from torch import Tensor

from halfstep.diagnosis.defect import Defect, Kind, Site
from halfstep.shadow.classify import (
    classify,
    integers_defect,
    is_bad_number,
    is_out_of_range,
    of_scale,
    rounded_defect,
    site_of,
    trace,
)
from halfstep.shadow.gradient_sums import GradientSums, gradient_sums
from halfstep.shadow.losses import LossHistory, SeenLoss
from halfstep.shadow.lost_updates import find_emptied_update, find_lost_updates
from halfstep.shadow.memory import SHADOW_DTYPES, Entry
from halfstep.shadow.mode import ShadowMode
from halfstep.shadow.operations import Operation, Rounded
from halfstep.shadow.operators import is_readable, local
from halfstep.shadow.repair import Repair
from halfstep.shadow.reproduction import Reproduction
from halfstep.shadow.scale import is_unknown
from halfstep.shadow.search import LineSearch
from halfstep.shadow.walk import earliest, first_defect, first_emptied, first_scaled, writers

#: A finite loss is wrong if it is this far from its shadow, relative to it: the first number if
#: half precision has lost values in the step, else the second.
LOSS_DIFFERS = (0.01, 0.1)
#: Smaller losses than this share of the first ones are compared with that.
SMALLEST_LOSS = 0.01
REPAIR_BYTES = 2**30  # of the values of a step in which a line computes in fp32
REPRODUCED: tuple[Kind, ...] = ("overflow", "rounding", "loss_differs", "scale_too_large")
UNDERFLOW = 0.1  # share of the squared norm of the gradients
GRADIENTS_DIFFER = 0.5  # relative distance


class Judge:
    """Judges the steps of a loop, in order."""

    def __init__(self, mode: ShadowMode) -> None:
        self._mode = mode
        self._history = LossHistory()
        self._search = LineSearch()
        self.reproductions: dict[Site, Reproduction] = {}  # by the site of a defect
        self.begin()

    @property
    def is_searching(self) -> bool:
        """Whether another step may find the line that makes a loss wrong."""
        return self._search.is_under_way

    @property
    def has_lost_gradients(self) -> bool:
        """Whether a pass has left nonfinite gradients, and they are gone."""
        gradients = self._dropped.nonfinite
        return bool(gradients) and all(gradient.has_expired() for gradient in gradients)

    def begin(self) -> None:
        """Begin a step."""
        line = self._search.line
        self._mode.measures = self._search.measures
        self._mode.repair = None if line is None else Repair(line, REPAIR_BYTES)
        self._losses: list[SeenLoss] = []
        self._judged = 0  # of the losses
        self._has_lost_loss = False
        self._dropped = GradientSums([])  # of a pass, until a step has been judged
        self._dropped_loss: SeenLoss | None = None
        self.defects: list[Defect] = []

    def add(self, loss: SeenLoss) -> None:
        """Add a loss of the step."""
        self._losses.append(loss)
        self._history.add(loss.shadow)

    def judge(self, step: int, gradients: Sequence[Tensor], *, is_scaled: bool) -> None:
        """Judge the new losses, and the gradients with which an optimizer is about to step.

        is_scaled: a GradScaler is used.
        """
        losses, self._judged = self._losses[self._judged :], len(self._losses)
        sums = gradient_sums(self._mode, gradients)
        for loss in losses:
            if not math.isfinite(loss.value):
                self._has_lost_loss = True
                defect = trace(loss.writer, "loss", step)
                if is_scaled:  # a loss of gradients, as a penalty
                    defect = of_scale(defect, self._mode.scale)
                self.found(self._with_loss(defect, loss, sums))
                break
        latest = self._losses[-1] if self._losses else None
        if not self._has_lost_loss and sums.nonfinite:
            self._nonfinite_gradients(step, sums, latest)
        if not self._has_lost_loss:
            for loss in losses:
                self._finite_loss(step, loss, sums)
            self._finite_gradients(step, sums, is_scaled=is_scaled)
        if is_scaled:
            for loss in losses:
                if loss.power != 0 and not is_unknown(loss.power):
                    site = site_of(first_scaled(loss.writer))
                    self.found(
                        Defect(
                            step=step,
                            kind="scaled_gradients_in_loss",
                            symptom="loss",
                            site=site,
                            scale=self._mode.scale,
                        )
                    )
                    break

    def pass_ended(self, gradients: Sequence[Entry]) -> None:
        """Keep nonfinite gradients that a backward pass has left: a loop may drop them itself."""
        results = [(gradient, gradient.writers[-1].result) for gradient in gradients]
        nonfinite = [
            gradient for gradient, facts in results if facts is not None and facts.nonfinite
        ]
        if nonfinite and not self._dropped.nonfinite:
            loss = self._losses[-1] if self._losses else None
            self._dropped, self._dropped_loss = GradientSums(nonfinite), loss

    def record_change(self, kind: Kind, step: int, operation: Operation, scale: float) -> None:
        """Record a change of gradients at the wrong time, or a use of scaled ones."""
        site = site_of(operation)
        self.found(Defect(step=step, kind=kind, symptom="gradient", site=site, scale=scale))

    def record_rounded(self, rounded: Rounded) -> None:
        """Record the first use of a tensor that its step has left far from fp32."""
        self.found(rounded_defect(rounded))

    def end(self, step: int, weights: Iterable[Tensor], parameters: Iterable[Tensor]) -> None:
        """Judge what is left at the end of a step.

        weights: of the optimizers that have stepped.  parameters: all of the loop's modules.
        """
        changed, memory = list(self._mode.lasting.values()), self._mode.memory
        for lost_update in find_lost_updates(changed, memory, self._mode.halved, step):
            self.found(lost_update)
        if self._dropped.nonfinite and not any(
            earlier.symptom in ("loss", "gradient") for earlier in self.defects
        ):
            self._nonfinite_gradients(step, self._dropped, self._dropped_loss, are_dropped=True)
        for operation, share in self._mode.integers[:1]:
            self.found(integers_defect(operation, share, step))
        lost = {d.kind for d in self.defects if d.symptom in ("loss", "gradient")}
        if any(defect.kind == "nonfinite_input" for defect in self.defects):
            self._overflow_without_effect(step)  # unless this is its effect
        if lost - {"scale_too_large"}:
            return
        for weight in filter(is_readable, map(local, weights)):
            entry = self._mode.memory.find(weight)
            facts = self._mode.facts(weight)
            is_seen = entry is not None and entry.writers[-1].result is not None
            if facts is not None and facts.nonfinite and entry is not None and is_seen:
                self.found(trace(entry.writers[-1], "weight", step))
                return
        if lost:
            return
        emptying = find_emptied_update(filter(is_readable, map(local, parameters)), memory)
        if emptying is not None:
            overflow, emptied = emptying
            self.found(replace(trace(overflow, "weight", step), origin=site_of(emptied)))
            return
        used = {loss.writer for loss in self._losses}
        scalars = (scalar for scalar in self._mode.scalars if scalar not in used)
        aside = next(filter(is_bad_number, scalars), None)
        if aside is not None:
            defect = trace(aside, "value", step)
            if defect.kind != "nonfinite_input":  # which may be meant, as a gap in the data
                self.found(of_scale(defect, self._mode.scale))
        elif not self.defects:
            self._overflow_without_effect(step)

    def end_loop(self, step: int, *, is_training: bool) -> None:
        """Judge a step in which the loop has ended before its backward pass.

        is_training: a module in training mode ran in it, with gradients.
        """
        if self._losses or self.defects:
            return
        if (rejection := self._mode.rejected) is not None:
            self.found(
                Defect(
                    step=step,
                    kind="rejected",
                    symptom="value",
                    site=site_of(rejection.maker),
                    origin=site_of(rejection.operation),
                    error=rejection.error,
                    sample=(rejection.value, rejection.value_fp32),
                    is_last=True,
                    helps=("fp32",),
                )
            )
        elif is_training and (overflow := self._find_overflow(step)) is not None:
            self.found(replace(overflow, is_last=True))

    def found(self, defect: Defect) -> None:
        """Add a defect of the step, unless it is known."""
        if not any(_is_same(defect, other) for other in self.defects):
            self.defects.append(defect)
        for operation, kept in self._mode.reproductions:
            if defect.kind in REPRODUCED and site_of(operation) == defect.site:
                self.reproductions.setdefault(defect.site, kept)

    def _with_loss(self, defect: Defect, loss: SeenLoss | None, sums: GradientSums) -> Defect:
        """Add the step's loss, and keep only remedies that make all of the step finite."""
        defect = replace(defect, scale=self._mode.scale, has_grown=self._history.growth())
        if loss is None:
            return defect
        is_finite = math.isfinite(loss.shadow) and sums.are_shadows_finite
        helps = defect.helps if is_finite or defect.symptom == "loss" else ()
        if defect.symptom == "loss" and not math.isfinite(loss.shadow):
            helps = ()
        return replace(
            defect,
            loss=loss.value,
            loss_fp32=loss.shadow,
            are_gradients_finite=sums.are_shadows_finite,
            helps=helps,
        )

    def _nonfinite_gradients(
        self, step: int, sums: GradientSums, loss: SeenLoss | None, *, are_dropped: bool = False
    ) -> None:
        """Add the first defect of those that led to nonfinite gradients: what no scale helps first.

        are_dropped: the loop leaves out such steps, so only what half precision loses is a defect.
        """
        written = [entry.writers[-1] for entry in sums.nonfinite]
        traced = [
            trace(writer, "gradient", step)
            for writer in sorted(written, key=lambda writer: first_defect(writer).number)
            if writer.result is not None
        ]
        if are_dropped:
            traced = [candidate for candidate in traced if is_out_of_range(candidate.kind)]
        if not traced:
            return
        defect = min(traced, key=lambda candidate: is_out_of_range(candidate.kind))
        self.found(self._with_loss(of_scale(defect, self._mode.scale), loss, sums))

    def _finite_loss(self, step: int, loss: SeenLoss, sums: GradientSums) -> None:
        """Add a defect if a finite loss is far from its shadow."""
        if not (math.isfinite(loss.value) and math.isfinite(loss.shadow)):
            return
        lost = [operation for operation in self._mode.first_lost if not operation.is_backward]
        limit = LOSS_DIFFERS[0] if lost else LOSS_DIFFERS[1]
        usual = max(abs(loss.shadow), SMALLEST_LOSS * self._history.usual())
        is_far = abs(loss.value - loss.shadow) > limit * usual
        has_lost_gradients = lost and not sums.nonfinite and sums.lost > UNDERFLOW * sums.shadow > 0
        if not is_far and not has_lost_gradients:
            return
        defect = Defect(
            step=step,
            kind="loss_differs",
            symptom="loss",
            loss=loss.value,
            loss_fp32=loss.shadow,
            helps=("fp32",),
        )
        self.found(self._lost_before(defect, lost[0]) if lost else self._add_rounding(defect, loss))

    def _lost_before(self, defect: Defect, operation: Operation) -> Defect:
        """Add to a wrong loss where values were lost."""
        lost, facts = classify(operation, "loss", defect.step, is_lost=True), operation.result
        return replace(
            defect,
            site=lost.site,
            dtype=lost.dtype,
            count=facts.lost if facts else 0,
            elements=facts.elements if facts else 0,
            value=lost.value,
            limit=lost.limit,
            origin=lost.origin,
            rounded_in=lost.rounded_in,
            helps=lost.helps,
        )

    def _add_rounding(self, defect: Defect, loss: SeenLoss) -> Defect:
        """Add to a wrong loss the line with which it is right in fp32, once that is found."""
        was_found = self._search.found is not None
        self._search.see(loss.writer, loss.value, loss.shadow, loss.repaired)
        source = self._search.found
        if source is None:
            return defect
        dtype = str(source.dtype).removeprefix("torch.")
        repaired = None if was_found else loss.repaired
        return replace(defect, site=site_of(source), dtype=dtype, loss_repaired=repaired)

    def _finite_gradients(self, step: int, sums: GradientSums, *, is_scaled: bool) -> None:
        if sums.nonfinite or sums.shadow <= 0:
            return
        share, distance = sums.lost / sums.shadow, math.sqrt(sums.distance / sums.shadow)
        kind: Kind = "gradients_underflow"
        if share <= UNDERFLOW and not sums.emptied:
            kind, share = "gradients_differ", distance
            if distance <= GRADIENTS_DIFFER:
                return
        scale = self._mode.scale
        defect = Defect(step=step, kind=kind, symptom="gradient", share=share, scale=scale)
        if share <= UNDERFLOW:
            count = len(sums.emptied)
            defect = replace(defect, share=None, count=count, elements=sums.tensors)
        flushed = sums.emptied[-1] if sums.emptied else sums.flushed
        origin = None if flushed is None else first_emptied(flushed.writers[-1])
        if kind == "gradients_underflow" and origin is not None:
            overflowed = writers(origin, lambda other: bool(other.lost))
            if (found := earliest(map(first_defect, overflowed), before=origin)) is not None:
                divisor = classify(found, "gradient", step, is_lost=True)
                if divisor.kind == "overflow":
                    self.found(divisor)
                    return
            is_at_any_scale = is_scaled and origin.power == 0
            defect = replace(
                defect, site=site_of(origin), helps=("fp32",) if is_at_any_scale else ()
            )
        self.found(defect)

    def _overflow_without_effect(self, step: int) -> None:
        if (overflow := self._find_overflow(step)) is not None:
            self.found(replace(overflow, kind="overflow_without_effect"))

    def _find_overflow(self, step: int) -> Defect | None:
        """Return the first overflow of the forward pass in half precision."""
        for operation in self._mode.first_lost:
            is_half = operation.result is not None and operation.dtype in SHADOW_DTYPES
            if is_half and not operation.is_backward:
                defect = classify(operation, "value", step, is_lost=True)
                if defect.kind == "overflow" and defect.value:
                    return defect
        return None


def _is_same(one: Defect, other: Defect) -> bool:
    return (one.kind, one.site, one.symptom) == (other.kind, other.site, other.symptom)
