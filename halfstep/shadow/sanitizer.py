"""Shadow steps of a training loop. This module imports torch."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from halfstep.diagnosis.defect import Defect, Kind, Site
from halfstep.shadow.classify import stale_cast_defect
from halfstep.shadow.gradient_changes import GradientChanges, gradients_of, parameters_of
from halfstep.shadow.judge import Judge
from halfstep.shadow.lasting_tensors import keep_halved, keep_nonfinite, keep_rounded, keep_scaled
from halfstep.shadow.lines import ModuleNames
from halfstep.shadow.losses import new_loss
from halfstep.shadow.memory import SHADOW_DTYPES, ByStorage, Entry, ShadowMemory
from halfstep.shadow.mode import ShadowMode
from halfstep.shadow.operations import Operation
from halfstep.shadow.operators import is_readable, tensors_in
from halfstep.shadow.reproduction import Reproduction
from halfstep.shadow.walk import find_kept

DEFAULT_BUDGET_BYTES = 4 * 2**30
#: Half-precision tensors of at most this size keep what they are in fp32 until they are changed.
LARGEST_CONSTANT, MOST_CONSTANTS = 64, 1000


class Sanitizer:
    """Runs steps of a loop with their shadows, and judges each.

    While it is armed, its calls come from hooks, in the order of a step: `loss`, `backward_begins`
    and `backward_ends` for each pass, `judge` before an optimizer's step or unscaling, `next_step`.
    """

    def __init__(
        self,
        on_defects: Callable[[Sequence[Defect]], None],
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
    ) -> None:
        """on_defects: gets what each step has shown, if anything."""
        self.names = ModuleNames()
        self.mode = ShadowMode(budget_bytes, self.names.current, self.names.variable)
        self.mode.on_write, self.mode.on_decision = self._record_write, self._record_decision
        self.mode.on_stale_cast = self._record_stale_cast
        self._judge, self._on_defects = Judge(self.mode), on_defects
        self.mode.on_rounded = self._judge.record_rounded
        self._changes = GradientChanges(self.mode.memory, self.mode.clips, self._record_change)
        self.is_armed = self._is_entered = False
        self.step = 0  # the one under way, from 1 on
        self.has_half_operators = False
        self.is_searching = False  # another step may find the line that makes a loss wrong
        #: The step of what was last reported as kept, by the line that has kept it.
        self._kept_found: dict[tuple[str, int], int] = {}
        self._scaler: object = None  # that has scaled a loss of this step
        self._own_scales: set[float] = set()  # of a loop that multiplies its loss itself
        self._start()

    @property
    def reproductions(self) -> dict[Site, Reproduction]:
        """The operators of defects with their inputs, where these are kept."""
        return self._judge.reproductions

    @property
    def defects(self) -> list[Defect]:
        """What the step under way has shown so far."""
        return self._judge.defects

    @property
    def has_scaler(self) -> bool:
        """Whether a loss of this step was scaled."""
        return self._scaler is not None

    def arm(self, step: int) -> None:
        """Begin to run operators with their shadows."""
        self.step, self.is_armed = step, True
        self.mode.thread = threading.get_ident()
        self.names.install()
        self.mode.is_paused = False
        if not self._is_entered:
            self.mode.__enter__()  # type: ignore[no-untyped-call]
            self._is_entered = True

    def disarm(self) -> None:
        """Take the mode off the stack, unless a mode of the loop is above it."""
        self.is_armed, self.mode.is_paused = False, True
        self.names.remove()
        self.mode.reset()
        self._forget_contents()
        self._start()
        if _get_current_dispatch_mode() is self.mode:
            self.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._is_entered = False

    def move(self) -> None:
        """Observe the current thread from now on, instead of the one that was observed before."""
        self.mode.thread = threading.get_ident()
        self.mode.reset()
        self._start()
        self.mode.__enter__()  # type: ignore[no-untyped-call]
        self._is_entered = True

    @property
    def is_other_thread(self) -> bool:
        """Whether the current thread is not the observed one."""
        return threading.get_ident() != self.mode.thread

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Run operators that neither this mode nor one of the loop sees."""
        with DisableTorchFunction(), torch.no_grad(), _disable_current_modes():
            yield

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Run operators without shadows."""
        was_paused, self.mode.is_paused = self.mode.is_paused, True
        try:
            yield
        finally:
            self.mode.is_paused = was_paused

    @property
    def is_left_out(self) -> bool:
        """Whether the loop has cleared gradients that were not finite, without a step."""
        return not self.has_scaler and self._judge.has_lost_gradients

    def loss(self, loss: object, scaler: GradScaler | None = None) -> None:
        """Examine a loss that is scaled, or from which a backward pass starts."""
        if isinstance(loss, list | tuple):
            for item in loss:
                self.loss(item, scaler)
            return
        is_scaled_loss = scaler is None and self._scaler is not None
        if isinstance(loss, Tensor) and not (self._passes or is_scaled_loss):
            with self.apart():
                self._see(loss, scaler)

    def _see(self, loss: Tensor, scaler: GradScaler | None) -> None:
        if self.mode.is_over_budget:
            return
        seen = new_loss(self.mode, loss, is_scaled=scaler is None)
        if seen is not None:
            self._judge.add(seen)
        if scaler is None or scaler._scale is None or not is_readable(scaler._scale):
            return
        self.mode.entry(scaler._scale).power = 1
        if self._scaler is None:
            self._scaler = scaler
            self.mode.scale = float(scaler._scale)

    def backward_begins(self, roots: Any = (), gradients: Any = ()) -> None:
        """Note that a pass begins.

        A loss that the loop itself has multiplied by a power of 2 is a scaled one.
        """
        self._passes += 1
        self.mode.has_pass = self.has_loss = True
        if self._passes == 1:
            self._changes.pass_begins(roots)
        is_first = self._scaler is None and self._passes == 1
        if is_first and len(roots) == len(gradients) == 1 and not self.mode.is_over_budget:
            with self.apart():
                scale = self.mode.entry(roots[0]).writers[-1].loss_scale
                if scale > 1.0:
                    self.mode.entry(roots[0]).power = 1
            if scale > 1.0:
                self.scale_by(scale, gradients[0])

    def scale_by(self, scale: float, gradient: Tensor) -> None:
        """Note that a pass begins with the gradient of a loss that was multiplied by a scale."""
        self.mode.scale = scale
        self._own_scales.add(scale)
        with self.apart():
            self.mode.entry(gradient).power = 1

    def backward_ends(self) -> None:
        """Note that a pass has ended, which may have left scaled gradients."""
        self._passes -= 1
        self.mode.has_pass = self._passes > 0
        if self._passes:
            return
        gradients = {
            parameter: parameter.grad
            for parameter in self.names.parameters()
            if parameter.grad is not None and is_readable(parameter.grad)
        }
        self._changes.pass_ended(gradients.items())
        found = map(self.mode.memory.find, gradients.values())
        entries = [entry for entry in found if entry is not None]
        if self._scaler is not None:
            self._changes.are_scaled(entries)
        else:
            self._judge.pass_ended([entry for entry in entries if entry.is_suspect])

    def record_scaling(self, losses: object, scaler: GradScaler) -> None:
        """Record the losses that a scaler has scaled."""
        with self.apart():
            if (scale := _scale_of(scaler)) is not None:
                for loss in filter(is_readable, tensors_in(losses)):
                    self._changes.record_scaling(loss, scaler, scale)

    def unscaling(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Judge an optimizer whose gradients a scaler is about to divide by its scale."""
        if id(optimizer) not in self._judged and not (self.mode.is_over_budget or self._passes):
            with self.apart():
                if (scale := _scale_of(scaler)) is not None:
                    self._changes.unscaling(optimizer, scaler, scale)
        self.judge(optimizer)

    def judge(self, optimizer: Optimizer) -> None:
        """Judge the losses and gradients with which an optimizer is about to step.

        From then on its gradients are unscaled, and equal their shadows: what the update rounds is
        judged by itself.
        """
        if id(optimizer) in self._judged or self.mode.is_over_budget or self._passes:
            return
        self._judged.add(id(optimizer))
        parameters = parameters_of(optimizer)
        self._weights |= {id(parameter): parameter for parameter in parameters}
        self.judge_gradients(
            [parameter.grad for parameter in parameters if parameter.grad is not None]
        )
        with self.apart():
            self._changes.stepping(optimizer)
            for gradient in gradients_of(optimizer):
                self.mode.entry(gradient).power = 0
                self.mode.memory.forget(gradient)

    def judge_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Judge the losses and gradients of passes."""
        with self.apart():
            self._judge.judge(self.step, gradients, is_scaled=self.has_scaler)

    def end_loop(self) -> None:
        """Judge the step under way, in which the loop has ended."""
        self.judge_gradients([])  # losses that no optimizer has stepped with
        with self.apart():
            self._judge.end_loop(self.step, is_training=self.names.is_training)

    def record_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped: weights are no scaled values, whatever it did."""
        for parameter in filter(is_readable, parameters_of(optimizer)):
            if (entry := self.mode.memory.find(parameter)) is not None:
                entry.power = 0
        self._changes.record_step(optimizer)

    def restart(self) -> None:
        """Forget what the step under way has shown so far."""
        self.mode.reset()
        self._start()

    def next_step(self, step: int) -> None:
        """End the step under way: judge what it leaves behind. step: the number of the next one."""
        with self.apart():
            if not self.mode.is_over_budget:
                self._changes.end()
                self._judge.end(self.step, self._weights.values(), self.names.parameters())
                keep_nonfinite(self.mode, self.step)
                keep_scaled(self.mode, self.step)
                keep_halved(self.mode)
                keep_rounded(self.mode, self.step)
            else:
                self._forget_contents()
            defects = self._judge.defects
            self.is_searching = self._judge.is_searching
            self.has_half_operators |= bool(self.mode.half_operators)
            constants = list(_constants(self.mode.memory))
            self.mode.reset()
            for entry in constants[:MOST_CONSTANTS]:
                self.mode.memory.restore(entry)
        self._start()
        self.step = step
        if defects:
            self._on_defects(defects)

    def _forget_contents(self) -> None:
        """Forget what tensors hold: a step without shadows may change it."""
        self.mode.kept, self.mode.carried = ByStorage(), ByStorage()
        self.mode.rounded = ByStorage()

    def _start(self) -> None:
        """Forget what belongs to one step."""
        self._judge.begin()
        self._scaler, self.mode.scale = None, 1.0
        self._passes = 0  # backward passes under way
        self.mode.has_pass = self.has_loss = False
        self._weights: dict[int, Tensor] = {}  # of optimizers that step in this step
        self._judged: set[int] = set()  # ids of optimizers
        self._changes.begin()
        self.names.is_training = False

    def _record_change(self, kind: Kind, operation: Operation) -> None:
        kept = find_kept(operation) if kind == "scaled_gradients_edited" else None
        is_kept = kept is not None or kind == "scaled_gradients_kept"
        if is_kept and not self.has_scaler and len(self._own_scales) < 2:  # it may stay the same
            return
        if kept is None:
            self._judge.record_change(kind, self.step, operation, self.mode.scale)
            return
        place = kept.origin.place
        if self._kept_found.get((place.file, place.line)) != kept.step:
            self._kept_found[place.file, place.line] = kept.step
            self._judge.record_change("scaled_gradients_kept", kept.step, kept.origin, kept.scale)

    def _record_write(self, entry: Entry, operation: Operation, elements: int) -> None:
        """Note a change in place outside of a backward pass."""
        if not self._passes:
            self._changes.record_write(entry, operation, elements)

    def _record_stale_cast(self, operation: Operation) -> None:
        """Note the step's first use of a weight's cast from before the weight changed."""
        if not any(defect.kind == "stale_weight_cache" for defect in self._judge.defects):
            self._judge.found(stale_cast_defect(operation, self.mode.casts.region, self.step))

    def _record_decision(self, operation: Operation) -> None:
        """Note that the loop reads a comparison that another scale would change."""
        if self.has_scaler and not self._passes:
            self._record_change("scaled_gradients_compared", operation)


def _constants(memory: ShadowMemory) -> Iterator[Entry]:
    """Yield small tensors that one operator has rounded, and nothing has changed since."""
    for entry in memory.entries.values():
        is_small = entry.values is not None and entry.values.numel() <= LARGEST_CONSTANT
        if is_small and entry.dtype in SHADOW_DTYPES and len(entry.writers) == 1:
            [writer] = entry.writers
            if not (entry.has_expired() or entry.is_suspect or writer.is_backward):
                entry.writers = [replace(writer.alone(), number=0)]
                yield entry


def _scale_of(scaler: GradScaler) -> float | None:
    """Return a scaler's scale; None if it is not known yet, or on the meta device."""
    scale = scaler._scale
    return float(scale) if scale is not None and is_readable(scale) else None
