"""A training loop whose first steps run with their shadows. This module imports torch."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from msgspec import Struct

from halfstep.check.calls import Calls
from halfstep.check.report import Report
from halfstep.check.rows import rows_of
from halfstep.diagnosis.defect import Defect
from halfstep.diagnosis.observations import NONFINITE, Observation, Observations
from halfstep.diagnosis.statements import named, statement_of
from halfstep.shadow.classify import site_of
from halfstep.shadow.hooks import ShadowHooks
from halfstep.shadow.operations import Kept, Operation, Place
from halfstep.shadow.sanitizer import Sanitizer

NO_HALF_AFTER = 2  # steps with a scaler and without an operator in half precision


@dataclass(frozen=True)
class CheckedSteps:
    """Which steps are checked.

    steps: how many in all, 0 for every one.  every: only each n-th.  until_skip: end with the first
    step with a nonfinite loss or gradient, other than in the search for a loss scale.
    """

    steps: int = 20
    every: int = 1
    until_skip: bool = False


class Unexamined(Struct, frozen=True, kw_only=True):
    """Operators that the check could not examine, and its errors.

    operators: that could not be run again in fp32, with the error.  errors: of the check itself.
    """

    operators: dict[str, str]
    errors: list[str]
    steps_over_budget: int = 0  # whose shadows would have needed too much memory


class CheckedLoop:
    """Observes the loop that runs while it is entered."""

    def __init__(
        self,
        schedule: CheckedSteps,
        on_done: Callable[[], None] = lambda: None,
        *,
        keeps_inputs: bool = False,
    ) -> None:
        """on_done: called once the last step to check has ended.

        keeps_inputs: of operators that lose values, for `reproduce`.
        """
        self._schedule, self._on_done = schedule, on_done
        self._observations = Observations()
        self._sanitizer = Sanitizer(self._observe)
        self._sanitizer.mode.keeps_inputs = keeps_inputs
        self._sanitizer.mode.on_scaled_read = self._record_scaled_read
        self._scaled_reads: dict[Place, int] = {}  # the latest step
        self._hooks = ShadowHooks(self._sanitizer, self._step_ended, self._on_error, is_eager=True)
        self.calls = Calls(self._sanitizer, self._on_error)
        self._is_observed = False
        self._number = 1  # of the step under way
        self._has_skipped = self._has_scaler = False
        self._errors: list[str] = []
        self._process = os.getpid()
        self._over_budget = 0
        self.steps = 0  # checked

    def __enter__(self) -> Self:
        self.calls.install()
        self._hooks.install()
        self._hooks.begin()
        self._sanitizer.arm(self._number)
        self._is_observed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        self._sanitizer.disarm()  # again: below a mode of the loop its own stays, as hooks do
        self._hooks.remove()
        self.calls.disarm()

    def found(self) -> list[Observation]:
        """Return the findings, faults first."""
        has_half = self._sanitizer.has_half_operators
        if self._has_scaler and not has_half and self.steps >= NO_HALF_AFTER:
            defect = Defect(step=1, kind="no_half_operators", symptom="value")
            self._observations.add([defect])
        return self._observations.found(self.steps)

    def get_unexamined(self) -> Unexamined:
        """Return what could not be looked at."""
        return Unexamined(
            operators=self._sanitizer.mode.unknown,
            errors=self._errors,
            steps_over_budget=self._over_budget,
        )

    def report(self, script: str = "") -> Report:
        """Return the report. script: its name."""
        unexamined = self.get_unexamined()
        calls, others = self.calls.mistakes()
        return Report(
            script=script,
            torch=str(torch.__version__),
            steps=self.steps,
            rows=rows_of(calls, self.found(), others),
            unknown_operators=unexamined.operators,
            errors=unexamined.errors,
            steps_over_budget=unexamined.steps_over_budget,
        )

    def reproduce(self, folder: Path) -> list[Path]:
        """Write a script for each mistake whose operator can be run alone; return their paths."""
        paths = []
        for observation in self.found():
            site, kept = observation.first.site, self._sanitizer.reproductions
            if observation.is_fault and site in kept:
                name = f"{Path(site.file).stem}-{site.line}-{site.operator.strip('_')}"
                title = statement_of(observation).title
                paths.append(kept[site].write(folder, name, title, named(site)))
        return paths

    def _observe(self, defects: Sequence[Defect]) -> None:
        self._observations.add(defects)
        self._has_skipped |= any(
            defect.kind in NONFINITE and defect.symptom in ("loss", "gradient")
            for defect in defects
        )

    def _record_scaled_read(self, place: Place, value: float, kept: Kept | None) -> None:
        """Note that the loop reads a number of this or an earlier step that is still scaled."""
        step, scale = self._number, self._sanitizer.mode.scale
        if kept is not None:
            step, scale = kept.step, kept.scale
        if self._scaled_reads.get(place) == step or scale == 1.0 or not math.isfinite(value):
            return
        self._scaled_reads[place] = step
        self._observations.add(
            [
                Defect(
                    step=step,
                    kind="scaled_value_read",
                    symptom="value",
                    site=site_of(Operation(0, "item", place)),
                    value=value,
                    scale=scale,
                )
            ]
        )

    def _step_ended(self) -> None:
        sanitizer, schedule = self._sanitizer, self._schedule
        if os.getpid() != self._process:  # a fork, which inherits the hooks
            self._stop()
            return
        if sanitizer.is_other_thread:
            if sanitizer.is_armed and not self.steps:
                sanitizer.move()
            return
        self._number += 1
        if sanitizer.is_armed:
            self.steps += 1
            self._has_scaler |= sanitizer.has_scaler
            self._over_budget += sanitizer.mode.is_over_budget
            try:
                sanitizer.next_step(self._number)
            except Exception as error:
                self._on_error(error)
        if self.steps == schedule.steps or (schedule.until_skip and self._has_skipped):
            self._stop()
            self._on_done()
            return
        is_due = (self._number - 1) % schedule.every == 0
        if is_due and not sanitizer.is_armed and not self._errors:
            sanitizer.arm(self._number)
        elif sanitizer.is_armed and not is_due:
            sanitizer.disarm()

    def _stop(self) -> None:
        if not self._is_observed:
            return
        self._is_observed = False
        if self._sanitizer.is_armed:
            try:
                if not self._sanitizer.mode.is_over_budget:
                    self._sanitizer.end_loop()
            except Exception as error:
                self._on_error(error)
            self._observe(self._sanitizer.defects)  # of a step that has not ended
            self._sanitizer.disarm()
        self._hooks.remove()
        try:
            self.calls.remove()
        except Exception as error:
            self._on_error(error)

    def _on_error(self, error: Exception) -> None:
        """Give up after an error of the check."""
        self._errors.append(f"step {self._number:,}: {type(error).__name__}: {error}"[:1000])
        self._sanitizer.disarm()
