"""Steps of a watched loop that run with their shadows. This module imports torch.

Armed are: early steps and, as numbers change with the training, some at each tenfold step, for
mistakes without a symptom; steps after a skip that the loss scale does not explain; and
validations. They take at most 1 % of the run's time, and FREE_SECONDS. Of a model on the CPU this
is the thread's processor time: waits for data or for a busy processor are not the armed step's.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import psutil
import torch
from msgspec.structs import asdict, replace
from torch import cuda, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode

from halfstep.diagnosis.defect import Defect
from halfstep.diagnosis.observations import NONFINITE
from halfstep.shadow.hooks import ShadowHooks
from halfstep.shadow.memory import ByStorage
from halfstep.shadow.operations import Carried
from halfstep.shadow.operators import is_readable
from halfstep.shadow.sanitizer import DEFAULT_BUDGET_BYTES, Sanitizer
from halfstep.shadow.validations import Validations
from halfstep.telemetry.events import MOST_DEFECTS, Event, ShadowStep
from halfstep.watching.headroom import has_compiled

#: Consecutive armed steps after a skip; the next larger number if the cause was not found.
ARMED_STEPS = (2, 32, 64)
EARLY_STEPS = 3  # of a run, in which what has no symptom is seen
SECOND_LOOK, LOOK_FACTOR = 20, 10  # steps after the first one, for as many further steps
MOST_SEARCHED = 20  # further steps, while the line that makes a loss wrong is not found
ENOUGH = 2  # skips in armed steps
EARLY_SKIPS = 5  # consecutive; after these, skips that the scale may explain are examined, too
FEW = 0.5  # share of the parameters: above it, inf only does not prove an overflow
FREE_SECONDS, SHARE = 2.0, 0.01  # of the run's time, for armed steps
ALL_SKIPPED_SECONDS = 60.0  # the same in place of FREE_SECONDS, while every step is skipped
SLOWER = 5.0  # an armed step, before one was measured
SMALLEST_BUDGET_BYTES = 2**28
MOST_EVENTS = 200
#: On the stack: of a module that is called, with its hooks, and of an operator with its shadow.
FRAMES_OF_MODULE, FRAMES_OF_OPERATOR = 6, 100


class Held(Protocol):
    """Guard of the calls of a listener, as of halfstep.watching.hooks."""

    held: int


class ArmedSteps:
    """Arms steps, and reports what they show."""

    def __init__(
        self, on_event: Callable[[Event], None], on_error: Callable[[Exception], None]
    ) -> None:
        """on_error: called with the error after which no more steps are armed."""
        self._on_event, self._on_error = on_event, on_error
        self._sanitizer = Sanitizer(self._report)
        self._validations = Validations(self._sanitizer, self._end_validation)
        self.hooks = ShadowHooks(
            self._sanitizer,
            self._step_ended,
            self._on_failure,
            self._step_left_out,
            is_eager=False,
        )
        self.left = EARLY_STEPS  # steps to arm
        self.next_look: float = SECOND_LOOK  # the step from which on further ones are armed
        self._is_stopped = False
        self._skips = self._in_a_row = 0
        self._first_of_row = 0  # the step of the first of these
        self._searched = 0  # steps
        self._looks = 0  # index into ARMED_STEPS
        self._seen = 0  # skips in armed steps
        self._arm_at = 0  # number of skips from which on steps are armed again
        self._armed = self._events = 0
        self._clock, self._began = time.perf_counter, 0.0
        self._starts = {clock: clock() for clock in (time.perf_counter, time.thread_time)}
        self._first_step: int | None = None
        self._armed_seconds, self._usual_seconds, self._slower = 0.0, 0.0, SLOWER
        #: Storages of the loop's variables at the first armed step, with their versions.
        self._constant: dict[int, tuple[StorageWeakRef, int]] | None = None

    @property
    def is_armed(self) -> bool:
        """Whether the step under way is armed."""
        return self._sanitizer.is_armed

    def guard(self, guard: Held) -> None:
        """Set the guard whose calls run without shadows."""
        self._sanitizer.mode.is_apart = lambda: guard.held > 0

    def add(self, names: Mapping[nn.Module, str]) -> None:
        """Set the names of modules."""
        self._sanitizer.names.add(names)

    def stop(self) -> None:
        """Arm no more steps."""
        if self._validations.is_under_way and not self._is_stopped:
            self._end_validation()
        self._is_stopped, self.left, self.next_look = True, 0, math.inf
        self._disarm()

    def record_applied(self) -> None:
        """Record a step that was not skipped."""
        self._in_a_row = 0

    def look(self) -> None:
        """Arm the next steps, unless enough was seen."""
        if self._is_stopped or self.left or self._skips < self._arm_at:
            return
        if self._looks < len(ARMED_STEPS):
            self.left = ARMED_STEPS[self._looks]
            self._looks += 1

    def record_skip(
        self, step: int, infinite: int, nan: int, parameters: int, *, loss_is_finite: bool
    ) -> None:
        """Record a skip, and arm the next step if the cause is not evident.

        infinite, nan: numbers of parameters with inf only in their gradient, and with NaN.
        """
        if not self._in_a_row:
            self._first_of_row = step
        self._skips += 1
        self._in_a_row += 1
        is_near_limit = loss_is_finite and not nan and infinite <= max(1, FEW * parameters)
        if not is_near_limit or self._in_a_row > EARLY_SKIPS:
            self.look()

    def begin(self, step: int, *, is_between: bool = True) -> None:
        """Arm the step that begins, if armed steps are left and affordable.

        is_between: False if an optimizer of the step before may step still.
        """
        if self._first_step is None:
            self._first_step = step - 1
            self.next_look = step + SECOND_LOOK
            self._choose_clock()
        if step >= self.next_look:
            self.next_look = self._first_step + LOOK_FACTOR * (step - self._first_step)
            self.left = max(self.left, EARLY_STEPS)
        if self.left and is_between and not self.is_armed and self._is_affordable(step):
            self._arm(step)

    def _choose_clock(self) -> None:
        if all(device.type == "cpu" for device in self._devices()) and not cuda._initialized:
            self._clock = self._sanitizer.mode.clock = time.thread_time

    def begin_validation(self, step: int) -> None:
        """Arm a validation after a step, the first one and each tenfold one.

        A module was set to evaluation: a validation begins, if the training is between two steps.
        """
        if self._first_step is None or self._is_stopped or self._sanitizer.is_other_thread:
            return
        if not self._validations.is_due() or not self._is_affordable(step + 1):
            return
        if not self.is_armed:
            self._arm(step)
        elif not self._sanitizer.has_loss:
            self._sanitizer.restart()
        if self.is_armed and not self._sanitizer.has_loss:
            self._validations.begin(step, self._began + self._get_allowed_seconds())

    def _end_validation(self) -> None:
        try:
            defects = self._validations.end()
            self._armed_seconds += self._clock() - self._began
            self._disarm()
            self._report(defects)
        except Exception as error:
            self._on_failure(error)

    def _arm(self, step: int) -> None:
        """Arm what begins, if operators can be observed and there is enough memory."""
        budget = _budget_bytes(self._devices())
        is_possible = not has_compiled() and _get_current_dispatch_mode() is None
        if not is_possible or budget < SMALLEST_BUDGET_BYTES or self._is_deep():
            self.left = 0
            return
        self._find_left_over()
        self._sanitizer.mode.memory.budget = budget
        self._began = self._clock()
        self._sanitizer.mode.deadline = self._began + max(self._get_allowed_seconds(), FREE_SECONDS)
        self.hooks.begin()
        self._sanitizer.arm(step)

    def record_clip(self, optimizer: Optimizer, *, is_finite: bool) -> None:
        """End the armed step of a loop without a scaler that may leave out the optimizer's step."""
        if self.is_armed and not is_finite and not self._sanitizer.is_other_thread:
            self._sanitizer.judge(optimizer)
            self._step_ended()

    @property
    def _trains_nothing(self) -> bool:
        """Whether all of the latest steps were skipped, and why was not seen."""
        return self._in_a_row > EARLY_SKIPS and not self._seen

    def _is_affordable(self, step: int) -> bool:
        steps = max(1, step - (self._first_step or 0) - self._armed)
        self._usual_seconds = (self._get_elapsed_seconds() - self._armed_seconds) / steps
        needed = self._slower * self._usual_seconds
        return self._trains_nothing or needed <= self._get_allowed_seconds()

    def _get_allowed_seconds(self) -> float:
        """Return the seconds that armed steps may still take."""
        free = ALL_SKIPPED_SECONDS if self._trains_nothing else FREE_SECONDS
        return free + SHARE * self._get_elapsed_seconds() - self._armed_seconds

    def _get_elapsed_seconds(self) -> float:
        return max(0.0, self._clock() - self._starts[self._clock])  # another thread may go on

    def _is_deep(self) -> bool:
        """Return whether the frames that hooks add to nested modules may be too many."""
        frame, depth = sys._getframe(), 0
        while frame.f_back is not None:
            frame, depth = frame.f_back, depth + 1
        nested = max(
            (name.count(".") + 1 for name in self._sanitizer.names.list_given()), default=0
        )
        return depth + FRAMES_OF_MODULE * nested + FRAMES_OF_OPERATOR > sys.getrecursionlimit()

    def _devices(self) -> set[torch.device]:
        return {parameter.device for parameter in self._sanitizer.names.parameters()}

    def _find_left_over(self) -> None:
        """Find the tensors that a step before has left, other than data."""
        found = {
            tensor.untyped_storage()._cdata: (
                StorageWeakRef(tensor.untyped_storage()),  # type: ignore[no-untyped-call]
                tensor._version,
            )
            for tensor in self._sanitizer.names.lasting()
            if is_readable(tensor) and not tensor.is_inference()
        }
        if self._constant is None:
            self._constant = found
        left_over = self._sanitizer.mode.left_over = ByStorage()
        for key, (reference, version) in found.items():
            if self._in_a_row and not self._is_constant(key, version):
                left_over.add(reference, Carried(self._first_of_row, None))

    def _is_constant(self, key: int, version: int) -> bool:
        reference, known = (self._constant or {}).get(key, (None, -1))
        return reference is not None and not reference.expired() and version == known  # type: ignore[no-untyped-call]

    def _step_ended(self) -> None:
        sanitizer = self._sanitizer
        if not self.is_armed or sanitizer.is_other_thread:
            return
        if self._validations.is_under_way:  # a step amid it
            self._disarm()
            return
        if not sanitizer.has_loss:  # armed amid a step
            sanitizer.restart()
            return
        try:
            self._armed += 1
            sanitizer.next_step(sanitizer.step + 1)
            now = self._clock()
            seconds, self._began = now - self._began, now
            self._armed_seconds += seconds
            if self._usual_seconds:
                self._slower = seconds / self._usual_seconds
            self.left = max(0, self.left - 1)
            if not self.left and sanitizer.is_searching and self._searched < MOST_SEARCHED:
                self.left, self._searched = 1, self._searched + 1
            if not self.left or not self._is_affordable(sanitizer.step):
                self._disarm()
        except Exception as error:
            self._on_failure(error)

    def _step_left_out(self) -> None:
        """End the armed step, of which the pass that begins is no part."""
        self._step_ended()
        self._disarm()

    def _report(self, defects: Sequence[Defect]) -> None:
        # A value that only the loop uses, such as a metric, explains no skip.
        defects = [d for d in defects if not (d.symptom == "value" and d.kind in NONFINITE)]
        if not defects:
            return
        explaining = [d for d in defects if d.kind in NONFINITE and d.symptom != "validation"]
        if explaining:  # not only the search for a scale
            self._seen += 1
            if self._seen >= ENOUGH:  # not again until there are ten times as many skips
                self._seen = self.left = self._looks = 0
                self._arm_at = 10 * self._skips
        if self._events < MOST_EVENTS:
            self._events += 1
            shown = [recordable(defect) for defect in defects[:MOST_DEFECTS]]
            self._on_event(ShadowStep(step=defects[0].step, armed=self._armed, defects=shown))

    def _disarm(self) -> None:
        self._validations.is_under_way = False
        if self.is_armed:
            self._sanitizer.disarm()
            self.hooks.end()

    def _on_failure(self, error: Exception) -> None:
        self._is_stopped = True
        self.stop()
        self._on_error(error)


def _budget_bytes(devices: set[torch.device]) -> int:
    """Return how much memory shadows may take: a half of what the training has not used so far."""
    spare = [psutil.virtual_memory().available]
    for device in devices:
        if device.type == "cuda":
            free, _total = torch.cuda.mem_get_info(device)
            peak = torch.cuda.max_memory_allocated(device)
            spare.append(free + torch.cuda.memory_reserved(device) - peak)
    return int(min(DEFAULT_BUDGET_BYTES, min(spare) / 2))


def recordable(defect: Defect) -> Defect:
    """Return a defect without numbers that are not finite."""
    unknown = {
        name: None
        for name, value in asdict(defect).items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    if defect.sample is not None and not all(map(math.isfinite, defect.sample)):
        unknown["sample"] = None
    return replace(defect, **unknown)
