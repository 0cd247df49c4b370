"""Dispatch mode that runs operators of an armed step again, on shadow values.

Every operator first runs as it is. If it has to do with half precision, or with a value that half
precision has changed, it runs once more in fp32 on the shadows of its inputs. Values, control flow
and random numbers are those of the training. This module imports torch.
"""

import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from threading import get_ident
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, cuda
from torch._C import DisableTorchFunction, _current_autograd_node, _current_graph_task_id
from torch._C._autograd import _get_sequence_nr
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.shadow.call import NO_PASS, Call, Rejection
from halfstep.shadow.facts import Facts, all_finite, examine
from halfstep.shadow.hidden_autocast import run_as_in_training
from halfstep.shadow.lines import place_of_caller
from halfstep.shadow.lost_updates import Lasting
from halfstep.shadow.memory import ByStorage, Entry, OutOfMemory, ShadowMemory
from halfstep.shadow.number_clips import NumberClips
from halfstep.shadow.operations import OUTSIDE, Carried, Held, Kept, Operation, Place, Rounded
from halfstep.shadow.operators import (
    PLAIN,
    READS,
    Operator,
    has_numbers,
    is_readable,
    operator_of,
    tensors_in,
)
from halfstep.shadow.repair import Repair
from halfstep.shadow.reproduction import Reproduction
from halfstep.shadow.scale import UNKNOWN
from halfstep.shadow.weight_casts import WeightCasts
from halfstep.watching.async_host_copy import is_capturing

PURGE_EVERY = 64  # operators
TENSOR = "TensorType"
MOST_UNKNOWN = 20  # operators whose error is kept
LARGE = 1e15  # beyond it a few products are beyond fp32
#: Tensors without values.
OWN = (FakeTensor, UninitializedBuffer, UninitializedParameter)
#: A whole storage is searched for nonfinite values if it is not much larger than the tensor.
LARGEST_SEARCH = 4
LARGEST_READ = 2**16  # elements of a tensor that is read before a selection from it
MOST_OPERATIONS = 100_000  # of a step
ARRIVAL = "lift_fresh"  # the operator that makes a tensor of numbers of NumPy or Python
LARGEST_ARRIVAL = 2**20  # elements; a larger tensor may be a file that is mapped into memory


_modes: "WeakSet[ShadowMode]" = WeakSet()


def _after_fork() -> None:
    """Observe nothing in a forked process, such as a data-loader worker."""
    for mode in _modes:
        mode.thread = 0


os.register_at_fork(after_in_child=_after_fork)


class ShadowMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operators of one step, in order, with their shadows."""

    supports_higher_order_operators = True

    def __init__(
        self,
        budget_bytes: int,
        module: Callable[[], str],
        variable: Callable[[Tensor], tuple[str, Held]],
    ) -> None:
        """module: returns the name of the module under way.

        variable: returns the name of a tensor, and what a module holds it as.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = ShadowMemory(budget_bytes)
        self._module, self._variable = module, variable
        self.is_paused = True
        self.thread = get_ident()  # whose operators have shadows
        self.has_pass = False  # the thread waits for a backward pass
        self.is_apart: Callable[[], bool] = bool  # whether operators are not those of the loop
        self.is_over_budget = False
        self.carried: ByStorage[Carried] = ByStorage()  # why it is not finite
        #: The same of tensors that are NaN since a step that was not observed, if they are NaN.
        self.left_over: ByStorage[Carried] = ByStorage()
        self.arrived: ByStorage[Place] = ByStorage()  # where odd numbers of NumPy or Python came in
        self.halved: ByStorage[Place] = ByStorage()  # where it was cast to half precision
        self.kept: ByStorage[Kept] = ByStorage()  # what it keeps of scaled gradients
        self.rounded: ByStorage[Rounded] = ByStorage()  # how it was rounded in its step
        self.on_rounded: Callable[[Rounded], None] | None = None  # called with its first use
        self.scale = 1.0  # the loss scale, as a number
        self.clock = time.perf_counter
        self.deadline = math.inf  # by this clock: later operators have no shadows
        self.keeps_inputs = False  # of operators that lose values, for a reproduction
        self.measures = False  # whether each operator's own rounding is measured
        self.repair: Repair | None = None  # a line that computes in fp32 in this step
        self.on_write: Callable[[Entry, Operation, int], None] | None = None
        #: Called with a comparison that the loop reads, and that depends on the loss scale.
        self.on_decision: Callable[[Operation], None] | None = None
        #: Called with the place and value of a scaled number that the loop reads, and why it is
        #: scaled, if an earlier step has left it.
        self.on_scaled_read: Callable[[Place, float, Kept | None], None] | None = None
        self.clips = NumberClips()
        self.casts = WeightCasts(lambda tensor: bool(variable(tensor)[0]))
        #: Called with an operator of the forward pass that uses a cast from before a change.
        self.on_stale_cast: Callable[[Operation], None] | None = None
        self.scaled_read = Place()  # where the loop last read a value that depends on the scale
        self.unknown: dict[str, str] = {}  # operators that could not be run again, with the error
        self.operators = 0  # in all steps
        self.reset()
        _modes.add(self)

    def reset(self) -> None:
        """Begin a step without shadows."""
        self.memory.clear()
        self._number = self.fp64_runs = 0
        self._forward: dict[int, Operation] = {}  # by autograd's sequence number
        self.first_lost: list[Operation] = []  # where half precision first lost values
        self.integers: list[tuple[Operation, float]] = []  # that are others in fp32, with the share
        self.reproductions: list[tuple[Operation, Reproduction]] = []
        #: Half-precision tensors that are older than the step and were changed in it: as they were.
        self.lasting: dict[int, Lasting] = {}
        self.scalars: list[Operation] = []  # of the forward pass, nonfinite
        self.rejected: Rejection | None = None  # the last of the step
        self.half_operators = 0  # of the forward pass
        self.is_over_budget = False

    # --- what is known of tensors

    def entry(self, tensor: Tensor, *, is_part: bool = False) -> Entry:
        """Return what is known of a tensor; a new one was made before the step, or unseen.

        is_part: only some of it is about to be read.
        """
        found = self.memory.find(tensor)
        if found is not None and not (has_numbers(tensor) and found.is_unread_bytes()):
            if found.is_unread and not is_part:
                found.is_unread = False
                self.read(tensor, found, examine(tensor, None))
            return found
        entry = self.memory.add(tensor)
        origin = self._operation(OUTSIDE)
        origin.dtype = tensor.dtype
        entry.writers = [origin]
        key = tensor.untyped_storage()._cdata
        origin.carried, origin.kept = self.carried.find(key), self.kept.find(key)
        if (rounded := self.rounded.find(key)) is not None and self.on_rounded is not None:
            self.rounded.drop(key)
            self.on_rounded(rounded)
        if is_part and tensor.numel() > LARGEST_READ:
            entry.is_unread = entry.is_suspect = True
        elif has_numbers(tensor) and is_readable(tensor):
            largest = float(tensor.detach().abs().max()) if tensor.numel() else 0.0
            if not math.isfinite(largest):
                self.read(tensor, entry, examine(tensor, None))
            entry.is_suspect = entry.is_suspect or not _is_whole_finite(tensor)
            if not entry.is_suspect and LARGE < largest < math.inf:
                origin.variable, origin.held_as = self._variable(tensor)
                if origin.held_as != "weight":
                    origin.largest, origin.is_tainted = largest, True
                    origin.place = self._place_of_arrival(key)
        return entry

    def read(self, tensor: Tensor, entry: Entry, facts: Facts | None) -> None:
        """Note a defect in a tensor that was made before the step, or in a part of it."""
        origin = entry.writers[0]
        if facts is not None and origin.name == OUTSIDE and origin.result is None:
            origin.result, entry.is_suspect = facts, True
            key = tensor.untyped_storage()._cdata
            origin.place = self._place_of_arrival(key)
            origin.variable, origin.held_as = self._variable(tensor)
            if facts.nan:
                origin.carried = origin.carried or self.left_over.find(key)

    def _place_of_arrival(self, key: int) -> Place:
        """Return where a storage's numbers came in, or else where it is used now."""
        return self.arrived.find(key) or place_of_caller()

    def _see_arrival(self, tensor: Tensor) -> None:
        """Keep where a tensor of numbers of NumPy or Python is made, if they are odd."""
        if not (has_numbers(tensor) and is_readable(tensor) and tensor.numel() <= LARGEST_ARRIVAL):
            return
        entry = self.entry(tensor)
        if entry.is_suspect or entry.writers[0].largest:
            self.arrived.add(entry.storage, entry.writers[0].place)

    def facts(self, tensor: Tensor) -> Facts | None:
        """Return what is wrong in a tensor now."""
        detached = tensor.detach()
        return examine(detached, self.shadow(detached))

    def shadow(self, tensor: Tensor) -> Tensor:
        """Return a tensor's shadow."""
        return self.memory.shadow(tensor, self.entry(tensor))

    # --- operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator) or any(issubclass(cls, OWN) for cls in types):
            return func(*args, **kwargs)
        if any(cls not in PLAIN for cls in types):  # the operators within come here again
            return NotImplemented
        if self.is_paused or self.is_over_budget or self.is_apart() or not self._is_observed():
            return _run(func, args, kwargs)
        call = None
        with DisableTorchFunction(), torch.no_grad():
            try:
                call = self._before(func, args, kwargs)
            except Exception as error:
                self.record_failure(operator_of(func).name, error)
        try:
            result = _run(func, args, kwargs)
        except Exception as error:
            if call is not None:
                self._see_rejection(call, error)
            raise
        if call is not None:
            with DisableTorchFunction(), torch.no_grad():
                try:
                    if call.operator.name == "_to_copy":
                        self.casts.add(args[0], result)
                    call.follow(result)
                except Exception as error:
                    self.record_failure(call.operator.name, error)
                    self._forget(call.tensors, tensors_in(result))
        elif self.has_pass:
            with DisableTorchFunction(), torch.no_grad():
                try:
                    self._follow_unread(tensors_in([*args, *kwargs.values()]), tensors_in(result))
                except Exception as error:
                    self.record_failure(operator_of(func).name, error)
        return result

    def _see_rejection(self, call: Call, error: Exception) -> None:
        """Keep that an operator has raised what it would not with the values of fp32."""
        with DisableTorchFunction(), torch.no_grad():
            try:
                self.rejected = call.reject(error) or self.rejected
            except Exception as failure:
                self.record_failure(call.operator.name, failure)

    def _follow_unread(self, arguments: list[Tensor], results: list[Tensor]) -> None:
        """Note that how results depend on the loss scale is unknown, as of a sparse product."""
        if _current_graph_task_id() == NO_PASS or all(map(is_readable, arguments)):
            return
        for tensor in filter(is_readable, results):
            if has_numbers(tensor):
                self.entry(tensor).power = UNKNOWN

    def _is_observed(self) -> bool:
        """Return whether the current thread is the observed one, or its backward pass on a device.

        The engine runs a backward pass on a device in a thread of its own, with these modes.
        """
        if get_ident() != self.thread and not (
            self.has_pass and _current_graph_task_id() != NO_PASS
        ):
            return False
        return not (cuda._initialized and is_capturing())

    def _before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> "Call | None":
        """Keep what an operator is about to change; None if it needs no second run."""
        operator = operator_of(func)
        self.operators += 1
        if self.operators % PURGE_EVERY == 0:
            self.memory.purge()
            if self.clock() > self.deadline:
                raise OutOfMemory("the step takes too long")
        if operator.name in READS:
            self._see_read(tensors_in(args))
        if operator.name == ARRIVAL:
            self._see_arrival(args[0])
        if operator.is_view or operator.name in READS:
            return None
        tensors = tensors_in([*args, *kwargs.values()])
        if not all(map(is_readable, tensors)):
            return None
        return Call(self, func, operator, args, kwargs, tensors)

    def _see_read(self, tensors: list[Tensor]) -> None:
        for tensor in filter(is_readable, tensors):
            entry = self.memory.find(tensor)
            is_number = tensor.numel() == 1 and tensor.is_floating_point()
            if is_number and self.scale != 1.0 and float(tensor) == self.scale:
                self.clips.read_scale()
            if entry is None:
                kept = self.kept.find(tensor.untyped_storage()._cdata)  # of an earlier step
                if kept is not None and kept.origin.power == 1:
                    self._see_scaled_read(tensor, place_of_caller(), kept)
                continue
            if entry.power == 0:
                continue
            latest = entry.writers[-1]
            if tensor.dtype is not torch.bool:
                if latest.name != OUTSIDE:  # not the scale itself
                    if entry.power in (1, 2) and tensor.numel() == 1:
                        self.clips.read(float(tensor), entry.power)
                    place = place_of_caller()
                    self.scaled_read = replace(place, caller_file="", caller_line=0)
                    if entry.power == 1:
                        self._see_scaled_read(tensor, place, None)
            elif self.on_decision is not None and entry.power is None:
                self.on_decision(latest)

    def _see_scaled_read(self, tensor: Tensor, place: Place, kept: Kept | None) -> None:
        if self.on_scaled_read is not None and tensor.numel() == 1:
            self.on_scaled_read(place, float(tensor), kept)

    def _operation(self, name: str) -> Operation:
        self._number += 1
        if self._number > MOST_OPERATIONS:
            raise OutOfMemory(f"the step has more than {MOST_OPERATIONS:,} operators")
        return Operation(self._number, name)

    def operation(self, operator: Operator) -> Operation:
        """Return a new operation, with the place where it was called."""
        made = self._operation(operator.name)
        sequence = _get_sequence_nr() - 1
        node = _current_autograd_node() if _current_graph_task_id() != NO_PASS else None
        made.place = place_of_caller(is_backward=node is not None)
        if node is None:
            made.module = self._module()
        else:
            made.node = node.name()
            forward = self._forward.get(node._sequence_nr())
            if forward is not None:
                made.module = forward.module
                if not made.place.line:
                    made.place = forward.place
        self._forward.setdefault(sequence, made)
        return made

    def record_failure(self, name: str, error: Exception) -> None:
        """Keep the error of an operator that could not be run again."""
        if isinstance(error, OutOfMemory):
            self.give_up()
        elif name in self.unknown or len(self.unknown) < MOST_UNKNOWN:
            self.unknown[name] = f"{type(error).__name__}: {error}"[:200]

    def give_up(self) -> None:
        """Go on without shadows in this step, which states nothing."""
        self.is_over_budget = True
        self.memory.clear()

    def _forget(self, *tensors: Iterable[Tensor]) -> None:
        for group in tensors:
            for tensor in group:
                if is_readable(tensor):
                    self.memory.forget(tensor)


def _run(func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """Run an operator, and count the versions of a changed list, which a mode keeps from torch."""
    operator = operator_of(func)
    written = operator.find_written_tensors(args, kwargs) if operator.is_foreach else []
    tensors = [tensor for tensor in written if not tensor.is_inference()]
    versions = [tensor._version for tensor in tensors]
    if (
        args
        and isinstance(args[0], int | float)
        and func._schema.arguments[0].type.kind() == TENSOR
    ):
        # torch passes such a tensor as a number. An operator of it alone may only read it.
        dtype = torch.float32 if tensors_in(args) else torch.float64
        number = torch.tensor(args[0], dtype=dtype if isinstance(args[0], float) else None)
        args = (number, *args[1:])
    result = run_as_in_training(func, args, kwargs)
    if versions and versions == [tensor._version for tensor in tensors]:
        torch.autograd.graph.increment_version(tensors)
    return result


def _is_whole_finite(tensor: Tensor) -> bool:
    """Return whether all of a tensor's storage is known to be finite, not only this view."""
    if not is_readable(tensor):
        return True
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    if elements == tensor.numel():
        return True
    if elements > LARGEST_SEARCH * tensor.numel():
        return False
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    whole.set_(tensor.untyped_storage())
    return all_finite(whole)
