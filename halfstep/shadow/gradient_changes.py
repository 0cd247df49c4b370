"""Changes of gradients by the loop, between a backward pass and its step and after it.

This module imports torch.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import CodeType

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from halfstep.diagnosis.defect import Kind
from halfstep.shadow.facts import all_finite
from halfstep.shadow.lines import loop_code, outer_line
from halfstep.shadow.memory import Entry, ShadowMemory
from halfstep.shadow.number_clips import NumberClips
from halfstep.shadow.operations import OUTSIDE, Operation
from halfstep.shadow.operators import CLEARING, is_readable, local
from halfstep.shadow.scale import is_unknown
from halfstep.shadow.walk import first_edit


@dataclass(frozen=True, slots=True)
class Scaling:
    """A scaled loss."""

    scaler: GradScaler
    scale: float
    operation: Operation


class GradientChanges:
    """Reports changes that have no effect, or another one than with unscaled gradients."""

    def __init__(
        self,
        memory: ShadowMemory,
        clips: NumberClips,
        report: Callable[[Kind, Operation], None],
    ) -> None:
        self._memory, self._clips, self._report = memory, clips, report
        self._loop_code: CodeType | None = None  # of the function with the backward pass
        #: Storages of gradients with which an optimizer has stepped, and changes of them since.
        self._used: dict[int, StorageWeakRef] = {}
        self._late_edits: dict[int, Operation] = {}
        self._optimized: set[int] = set()  # ids of parameters that an optimizer steps
        #: Of other parameters: their ids and gradients by these' storages, and changes of those.
        self._others: dict[int, tuple[int, StorageWeakRef]] = {}
        self._other_edits: dict[int, tuple[Operation, Operation]] = {}  # the second with its caller
        self._has_stepped = False  # an optimizer, since the pass
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._scaled: dict[int, Entry] = {}  # by the id of their entries
        #: What has cleared the gradients of a pass, by the id of their entries.
        self._cleared: dict[int, Operation] = {}
        self._scalings: dict[int, Scaling] = {}  # of losses, by the number of the operation
        self._pass: Scaling | None = None  # of the pass under way
        self._passed = 0  # number of the last operation before that
        #: Gradients with how the losses of their passes were scaled, by the id of their entries.
        self._sources: dict[int, tuple[Entry, list[Scaling]]] = {}
        #: The last changes of tensors that are older than the step to what is neither independent
        #: of the scale nor proportional to it, by the id of their entries.
        self._changed: dict[int, tuple[Entry, Operation]] = {}

    def end(self) -> None:
        """Report the first tensor of before that has kept such values."""
        for entry, operation in self._changed.values():
            is_kept = not entry.has_expired() and entry.power == operation.power
            if is_kept and not any(writer.is_backward for writer in entry.writers):
                self._report("scaled_gradients_kept", self._add_caller(operation))
                return

    def record_scaling(self, loss: Tensor, scaler: GradScaler, scale: float) -> None:
        """See a loss that a scaler has scaled."""
        if (entry := self._memory.find(loss)) is not None:
            latest = entry.writers[-1]
            self._scalings[latest.number] = Scaling(scaler, scale, latest)

    def pass_begins(self, roots: Iterable[Tensor]) -> None:
        """Report changes of gradients after their step, of those that were cleared since."""
        self._clips.begin()
        self._loop_code = loop_code()
        latest = [entry.writers[-1].number for entry in map(self._memory.find, roots) if entry]
        self._passed = max(latest, default=0)
        self._pass = self._scalings.get(self._passed)
        for key, operation in self._late_edits.items():
            if self._is_cleared(key, self._used[key]):
                self._report("gradients_edited_after_step", operation)
        unused = [
            not operation.is_read  # of the original, which its next use marks
            and self._others[key][0] not in self._optimized
            and self._is_cleared(key, self._others[key][1])
            for key, (operation, _) in self._other_edits.items()
        ]
        if self._has_stepped and unused and all(unused):
            _, named = next(iter(self._other_edits.values()))
            self._report("gradients_edited_after_step", named)
        self._late_edits.clear()
        self._other_edits.clear()
        self._used.clear()
        self._has_stepped = False

    def _is_cleared(self, key: int, storage: StorageWeakRef) -> bool:
        """Return whether a gradient was set to 0 or to None."""
        entry = self._memory.entries.get(key)
        is_zero = entry is not None and entry.writers[-1].name in CLEARING
        return is_zero or storage.expired()  # type: ignore[no-untyped-call]

    def pass_ended(self, gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
        """See the gradients that a pass has left, each after its parameter."""
        self._others.clear()
        for parameter, gradient in gradients:
            if id(parameter) not in self._optimized:
                storage = gradient.untyped_storage()
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._others[storage._cdata] = id(parameter), reference

    def are_scaled(self, entries: Iterable[Entry]) -> None:
        """See the gradients of a pass of a scaled loss."""
        for entry in entries:
            if entry.power == 1:
                self._scaled[id(entry)] = entry
            if self._pass is not None and entry.writers[-1].number > self._passed:
                self._sources.setdefault(id(entry), (entry, []))[1].append(self._pass)

    def unscaling(self, optimizer: Optimizer, scaler: GradScaler, scale: float) -> None:
        """Report gradients that a scaler unscales and another one has scaled.

        Or else the first finite one that is not proportional to the scale, if it was.
        """
        gradients = list(gradients_of(optimizer))
        clip = self._clips.find({id(self._memory.find(gradient)) for gradient in gradients})
        if clip is not None:
            self._report("scaled_gradients_edited", clip)
            return
        for gradient in gradients:
            entry = self._memory.find(gradient)
            for source in self._sources.get(id(entry), (entry, ()))[1]:
                if source.scaler is not scaler and source.scale != scale:
                    self._report("scaled_by_another", source.operation)
                    return
            if entry is None or entry.power != entry.writers[-1].power:
                continue  # older than the step, or unscaled for another optimizer
            latest = entry.writers[-1]
            edit = first_edit(latest)
            is_of_pass = self._pass is not None and latest.number > self._passed
            is_unscaled = entry.power == 0 and latest.is_backward and is_of_pass
            if not (edit or is_unscaled) or not all_finite(gradient) or not bool(gradient.any()):
                continue
            unscaled = latest if edit is None else _unscaled_part(edit)
            if unscaled is not None:
                self._report("gradients_not_scaled", unscaled)
            elif edit is not None:
                self._report("scaled_gradients_edited", edit)
            return

    def stepping(self, optimizer: Optimizer) -> None:
        """Report that all gradients with which an optimizer steps were cleared after their pass."""
        self._optimized.update(map(id, parameters_of(optimizer)))
        entries = list(map(self._memory.find, gradients_of(optimizer)))
        cleared = [self._cleared.get(id(entry)) for entry in entries]
        if cleared and cleared[0] is not None and None not in cleared:
            self._report("gradients_cleared_before_step", cleared[0])
        for entry in entries:
            self._scaled.pop(id(entry), None)

    def record_step(self, optimizer: Optimizer) -> None:
        """See that an optimizer has stepped: later changes of its gradients have no effect."""
        self._has_stepped = True
        for gradient in gradients_of(optimizer):
            storage = gradient.untyped_storage()
            self._used[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def record_write(self, entry: Entry, operation: Operation, elements: int) -> None:
        """See a change in place outside of a backward pass. elements: of the changed tensor."""
        key, is_clearing = entry.storage.cdata, operation.name in CLEARING
        if is_clearing:
            self._sources.pop(id(entry), None)
        if is_clearing and len(entry.writers) > 1 and entry.writers[-2].is_backward:
            self._cleared[id(entry)] = self._add_caller(operation)
        is_state = elements > 1 and entry.writers[0].name == OUTSIDE  # single numbers may be a log
        if is_state and operation.power not in (0, 1) and not is_unknown(operation.power):
            self._changed[id(entry)] = entry, operation
        if key in self._used and not is_clearing:
            self._late_edits[key] = self._add_caller(operation)
        if key in self._others and not is_clearing:
            self._other_edits[key] = operation, self._add_caller(operation)
        is_scaled = self._scaled.pop(id(entry), None) is not None
        if is_scaled and operation.power is not None and operation.multiplier is not None:
            scale = 1.0 if self._pass is None else self._pass.scale
            edit = self._add_caller(operation)
            self._clips.edit(id(entry), edit, operation.multiplier, scale)
        if is_scaled and operation.power is None and not is_clearing:
            self._report("scaled_gradients_edited", self._add_caller(operation))

    def _add_caller(self, operation: Operation) -> Operation:
        """Return an operation with the line of the loop that called its function."""
        file, line = outer_line(self._loop_code)
        if not file or operation.place.caller_file:
            return operation
        place = replace(operation.place, caller_file=file, caller_line=line)
        return replace(operation, place=place)


def _unscaled_part(edit: Operation) -> Operation | None:
    """Return the gradient without a scale that a backward pass has added to one with it."""
    parts = [operand.writers[-1] for operand in edit.inputs]
    is_sum = edit.is_backward and edit.name == "add"
    return next((part for part in parts if is_sum and part.power == 0), None)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield this process's parts of an optimizer's gradients."""
    for parameter in parameters_of(optimizer):
        if parameter.grad is not None and is_readable(gradient := local(parameter.grad)):
            yield gradient
