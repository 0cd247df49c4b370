"""Records the usual step with few calls: one scaler, one optimizer on a CPU, one backward pass.

Most steps of most loops are alike: one scaled loss, over gradients that were cleared, one step that
is not skipped. `UsualSteps` follows such a step from call to call. Each of its methods returns
whether it recorded the call; one that does not fit returns False, and the caller then lets `Loop`
take over: `Loop` receives the part of the step that was recorded so far and examines the rest. Rows
are the same either way (tests/halfstep/monitor/test_repeated_passes.py).

The methods are called without a guard: they must not raise. This module imports torch.
"""

import math
import time
from typing import Any, Protocol
from weakref import ReferenceType, ref

from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from halfstep.clock import clock
from halfstep.monitor.backward_passes import OwnLosses
from halfstep.monitor.current_step import CurrentStep
from halfstep.monitor.gradients import Gradients
from halfstep.monitor.ring import Ring
from halfstep.telemetry.spool import UNKNOWN_US

#: What the step under way has reached. OFF: steps are not recorded here.
OFF, CLOSED, SCALED, PASSED, MEASURED, UPDATING = range(6)
STEPPED = OptState.STEPPED
perf_counter = time.perf_counter


class Counter(Protocol):
    """The loop that counts the steps."""

    closed_steps: int


class UsualSteps:
    """State of the step under way, while steps are usual ones."""

    def __init__(self, counter: Counter, layers_every: int) -> None:
        """layers_every: steps between rows with layer norms, which are not usual; 0: none."""
        self.counter, self.layers_every = counter, layers_every
        self.stage = OFF
        self.scaler: GradScaler | None = None
        self.optimizer: Optimizer | None = None

    def begin(
        self,
        row: CurrentStep,
        gradients: Gradients,
        own: OwnLosses,
        ring: Ring,
        started: float,
    ) -> None:
        """Record the steps that follow. started: the next step's start, by perf_counter."""
        self.row, self.gradients, self.own, self.ring = row, gradients, own, ring
        self.scaler, self.optimizer = row.scaler, gradients.optimizer
        self.started = started
        self.passes = self.steps = 0  # recorded here
        self.stage = CLOSED

    def scaled(self, scaler: GradScaler, result: Any, outputs: Any) -> bool:
        """Record the scaled loss."""
        if (
            self.stage != CLOSED
            or scaler is not self.scaler
            or type(outputs) is not Tensor
            or type(result) is not Tensor
            or not outputs.is_cpu
            or not outputs.requires_grad
            or outputs.ndim
        ):
            return False
        try:
            loss = outputs.item()
        except Exception:  # a tensor inside torch.func
            return False
        if type(loss) is not float or not -math.inf < loss < math.inf:
            return False
        self.loss = loss
        self.result: ReferenceType[Tensor] = ref(result)
        self.scaled_id = id(result)
        self.stage = SCALED
        return True

    def begins(self, roots: Any) -> bool:
        """Record the backward pass of the scaled loss, over gradients that were cleared."""
        if (
            self.stage != SCALED
            or type(roots) is not tuple
            or len(roots) != 1
            or self.result() is not roots[0]
            or not self.own.begins_cleared()
        ):
            return False
        self.passes += 1
        self.stage = PASSED
        return True

    def unscaled(self, scaler: GradScaler, _result: Any, optimizer: Optimizer) -> bool:
        """Measure unscaled gradients."""
        return self._measure(scaler, optimizer, is_scaled=False)

    def checked(self, scaler: GradScaler, _result: Any, optimizer: Optimizer) -> bool:
        """Measure gradients that are still multiplied by the scale."""
        return self._measure(scaler, optimizer, is_scaled=True)

    def _measure(self, scaler: GradScaler, optimizer: Optimizer, *, is_scaled: bool) -> bool:
        if self.stage != PASSED or optimizer is not self.optimizer or scaler is not self.scaler:
            return False
        every = self.layers_every
        if every and (self.counter.closed_steps + 1) % every == 0:
            return False
        gradients = self.gradients
        try:
            rate = optimizer.param_groups[0]["lr"]
            scale = scaler._scale
            if type(rate) is not float or scale is None or not gradients.is_current():
                return False
            norms = gradients.norms_on_host()
            factor = scale.item() if is_scaled else 1.0
            norm = (total := math.hypot(*norms)) / factor
        except Exception:  # `Loop` meets it too, and reports it
            return False
        if not total < math.inf:
            return False
        self.rate, self.norms, self.factor, self.total = rate, norms, factor, norm
        self.steps += 1
        self.stage = MEASURED
        return True

    def clips(self) -> bool:
        """Return True if a clip follows the measurement of unscaled gradients."""
        return self.stage == MEASURED

    def updating(self, scaler: GradScaler) -> bool:
        """Record flag and scale before `update` changes them in place."""
        if self.stage != MEASURED or scaler is not self.scaler:
            return False
        states = scaler._per_optimizer_states
        try:
            [state] = states.values()
            [flag] = state["found_inf_per_device"].values()
            scale = scaler._scale
            if (
                state["stage"] is not STEPPED
                or id(self.optimizer) not in states
                or scale is None
                or not flag.is_cpu
                or not scale.is_cpu
                or flag.item()
            ):
                return False
            self.before = scale.item()
        except Exception:  # `Loop` meets it too, and reports it
            return False
        self.stage = UPDATING
        return True

    def updated(self, scaler: GradScaler) -> bool:
        """Close the row, unless rows are due to be handed over."""
        if self.stage != UPDATING or scaler is not self.scaler:
            return False
        counter, total, ended = self.counter, self.total, perf_counter()
        step, seconds = counter.closed_steps + 1, ended - self.started
        try:
            after = scaler._scale.item()  # type: ignore[union-attr]
            known = (step, clock(), seconds, self.rate, UNKNOWN_US)
            if not self.ring.append(known, (self.loss, self.before, after, 0.0, 0.0, total, total)):
                return False
        except Exception:  # `Loop` meets it too, and reports it
            return False
        counter.closed_steps, self.started, self.stage = step, ended, CLOSED
        return True
