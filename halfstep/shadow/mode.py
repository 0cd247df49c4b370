"""Dispatch mode that runs operators of an armed step again, on shadow values.

Every operator first runs as it is. If it has to do with half precision, or with a value that half
precision has changed, it runs once more in fp32 on the shadows of its inputs. Values, control flow
and random numbers are those of the training. This module imports torch.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _current_autograd_node, _current_graph_task_id
from torch._C._autograd import _get_sequence_nr
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.shadow.facts import Facts, all_finite, examine
from halfstep.shadow.lines import place_of_caller
from halfstep.shadow.memory import SHADOW_DTYPES, Entry, OutOfMemory, ShadowMemory
from halfstep.shadow.operations import OUTSIDE, Carried, Input, Operation
from halfstep.shadow.operators import (
    READS,
    RESULTS,
    RUNNING_STATISTICS,
    SOFTMAXES,
    UNWRITTEN,
    Operator,
    has_opaque_state,
    is_half,
    operator_of,
    tensors_in,
)
from halfstep.shadow.scale import common_power, result_power

PURGE_EVERY = 64  # operators
MOST_UNKNOWN = 20  # operators whose error is kept
MOST_FP64_RUNS = 20  # of a step
NO_PASS = -1
PLAIN = (Tensor, nn.Parameter, nn.Buffer)
#: A change in place is rounded away if it moves at most this share of elements, and in fp32 at
#: least the other.
STILL, MOVED = 0.01, 0.5
#: A whole storage is searched for nonfinite values if it is not much larger than the tensor.
LARGEST_SEARCH = 4


class ShadowMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operators of one step, in order, with their shadows."""

    def __init__(
        self,
        budget_bytes: int,
        module: Callable[[], str],
        variable: Callable[[Tensor], str],
    ) -> None:
        """module: returns the name of the module under way.  variable: names a tensor."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = ShadowMemory(budget_bytes)
        self._module, self._variable = module, variable
        self.is_paused = True
        self.is_over_budget = False
        self.carried: dict[int, tuple[Any, Carried]] = {}  # by storage: its reference, and why
        self.scale = 1.0  # the loss scale, as a number
        self.on_write: Callable[[Entry, Operation], None] | None = None
        self.unknown: dict[str, str] = {}  # operators that could not be run again, with the error
        self.operators = self.reruns = 0  # in all steps
        self.reset()

    def reset(self) -> None:
        """Begin a step without shadows."""
        self.memory.clear()
        self._number = self.fp64_runs = 0
        self._forward: dict[int, Operation] = {}  # by autograd's sequence number
        self.first_lost: list[Operation] = []  # where half precision first lost values
        #: Half-precision tensors that are older than the step and were changed in it: as they were.
        self.lasting: dict[int, Lasting] = {}
        self.scalars: list[Operation] = []  # of the forward pass, nonfinite
        self.half_operators = 0  # of the forward pass
        self.is_over_budget = False

    # --- what is known of tensors

    def entry(self, tensor: Tensor) -> Entry:
        """Return what is known of a tensor; a new one was made before the step, or unseen."""
        found = self.memory.find(tensor)
        if found is not None and not (_has_numbers(tensor) and found.is_unread_bytes()):
            return found
        entry = self.memory.add(tensor)
        origin = self._operation(OUTSIDE)
        origin.dtype = tensor.dtype
        entry.writers = [origin]
        kept = self.carried.get(tensor.untyped_storage()._cdata)
        if kept is not None and not kept[0].expired():
            origin.carried = kept[1]
        if _has_numbers(tensor):
            self.read(tensor, entry, examine(tensor, None))
            entry.is_suspect = entry.is_suspect or not _is_whole_finite(tensor)
        return entry

    def read(self, tensor: Tensor, entry: Entry, facts: Facts | None) -> None:
        """See what is wrong in a tensor that was made before the step, or in a part of it."""
        origin = entry.writers[0]
        if facts is not None and origin.name == OUTSIDE and origin.result is None:
            origin.result, entry.is_suspect = facts, True
            origin.place = place_of_caller()
            origin.variable = self._variable(tensor)

    def facts(self, tensor: Tensor) -> Facts | None:
        """Return what is wrong in a tensor now."""
        detached = tensor.detach()
        return examine(detached, self.shadow(detached))

    def shadow(self, tensor: Tensor) -> Tensor:
        """Return a tensor's shadow."""
        return self.memory.shadow(tensor, self.entry(tensor))

    # --- operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(each not in PLAIN for each in types):  # the operators within come here again
            return NotImplemented
        kwargs = kwargs or {}
        if self.is_paused or self.is_over_budget:
            return _run(func, args, kwargs)
        call = None
        with torch.no_grad():
            try:
                call = self._before(func, args, kwargs)
            except Exception as error:
                self._failed(operator_of(func).name, error)
        result = _run(func, args, kwargs)
        if call is not None:
            with torch.no_grad():
                try:
                    call.follow(result)
                except Exception as error:
                    self._failed(call.operator.name, error)
                    self._forget(call.tensors, tensors_in(result))
        return result

    def _before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Call | None":
        """Keep what an operator is about to change; None if it needs no second run."""
        operator = operator_of(func)
        self.operators += 1
        if self.operators % PURGE_EVERY == 0:
            self.memory.purge()
        if operator.is_view or operator.name in READS:
            return None
        tensors = tensors_in([*args, *kwargs.values()])
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return None
        return Call(self, func, operator, args, kwargs, tensors)

    def _operation(self, name: str) -> Operation:
        self._number += 1
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

    def _failed(self, name: str, error: Exception) -> None:
        if isinstance(error, OutOfMemory):
            self.is_over_budget = True
            self.memory.clear()
        elif name in self.unknown or len(self.unknown) < MOST_UNKNOWN:
            self.unknown[name] = f"{type(error).__name__}: {error}"[:200]

    def _forget(self, *tensors: Iterable[Tensor]) -> None:
        for group in tensors:
            for tensor in group:
                if tensor.layout is torch.strided:
                    self.memory.forget(tensor)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator, and count the versions of a changed list, which a mode keeps from torch."""
    operator = operator_of(func)
    written = operator.written_tensors(args, kwargs) if operator.is_foreach else []
    tensors = [tensor for tensor in written if not tensor.is_inference()]
    versions = [tensor._version for tensor in tensors]
    result = func(*args, **kwargs)
    if versions and versions == [tensor._version for tensor in tensors]:
        torch.autograd.graph.increment_version(tensors)
    return result


@dataclass(frozen=True, slots=True)
class Lasting:
    """A half-precision tensor before and after the changes of a step."""

    tensor: Tensor
    entry: Entry
    before: Tensor
    shadow_before: Tensor

    def is_unmoved(self, memory: ShadowMemory) -> bool:
        """Return whether the changes were rounded away."""
        if self.entry.values is None:
            return False
        if int((self.before != self.tensor).sum()) > STILL * self.tensor.numel():
            return False
        shadow = memory.shadow(self.tensor, self.entry)
        return int((self.shadow_before != shadow).sum()) > MOVED * self.tensor.numel()


class Call:
    """One call of an operator: its inputs before it, and its second run after it."""

    __slots__ = (
        *("_actual", "_args", "_entries", "_func", "_infinite", "_inputs", "_is_rerun", "_kwargs"),
        *("_may_run", "_mode", "_powers", "_written", "operator", "tensors"),
    )

    def __init__(
        self,
        mode: ShadowMode,
        func: Any,
        operator: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
    ) -> None:
        """tensors: all of the arguments, in order."""
        self._mode, self._func, self.operator, self.tensors = mode, func, operator, tensors
        memory = mode.memory
        self._entries = [mode.entry(tensor) for tensor in tensors]
        has_half = any(map(is_half, tensors)) or any(map(is_half, (*args, *kwargs.values())))
        is_affected = has_half or any(entry.values is not None for entry in self._entries)
        self._may_run = (
            operator.is_known
            and not operator.draws(args, kwargs)
            and not has_opaque_state(operator, tensors)
        )
        self._is_rerun = is_affected and self._may_run
        self._written = operator.written_tensors(args, kwargs)
        self._inputs = [
            self._input(tensor, entry) for tensor, entry in zip(tensors, self._entries, strict=True)
        ]
        self._powers = list(self._powers_of(args, kwargs))
        self._infinite = any(
            isinstance(a, float) and math.isinf(a) for a in (*args, *kwargs.values())
        )
        self._actual, self._args, self._kwargs = args, args, kwargs
        if self._is_rerun:
            for tensor in self._written:
                if tensor.is_floating_point() or tensor.is_complex():
                    memory.materialize(tensor, mode.entry(tensor))
            self._keep_lasting()
            self._args, self._kwargs = self._shadowed(args, kwargs)

    def _input(self, tensor: Tensor, entry: Entry) -> Input:
        facts = None
        if entry.is_suspect:
            facts = examine(tensor, self._mode.memory.shadow(tensor, entry))
            if facts is not None and facts.nonfinite and len(entry.writers) == 1:
                self._mode.read(tensor, entry, facts)
        return Input(entry.writers, facts)

    def _powers_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[int | None]:
        """Yield the power of the loss scale in each argument with floating-point tensors."""
        for value in (*args, *kwargs.values()):
            powers = [self._mode.entry(t).power for t in tensors_in(value) if _has_numbers(t)]
            if powers:
                yield common_power(powers)

    def _keep_lasting(self) -> None:
        """Copy half-precision tensors that are older than the step, before their first change."""
        mode = self._mode
        for tensor in self._written:
            entry = mode.entry(tensor)
            is_new = entry.writers[0].name != OUTSIDE or id(entry) in mode.lasting
            if is_half(tensor) and tensor.numel() and not is_new:
                shadow = mode.memory.shadow(tensor, entry).clone()
                mode.lasting[id(entry)] = Lasting(tensor, entry, tensor.clone(), shadow)

    def _shadowed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the second run."""
        own = tuple(map(self._replaced, args))
        if self.operator.is_batch_norm:
            own = tuple(
                value.clone() if i in RUNNING_STATISTICS and isinstance(value, Tensor) else value
                for i, value in enumerate(own)
            )
        if self.operator.name in SOFTMAXES and len(own) > 2:
            own = (*own[:2], False)
        return own, {name: self._replaced(value) for name, value in kwargs.items()}

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._mode.shadow(value) if _has_numbers(value) else value
        if isinstance(value, torch.dtype):
            return SHADOW_DTYPES.get(value, value)
        if isinstance(value, list):
            return [self._replaced(each) for each in value]
        return tuple(map(self._replaced, value)) if isinstance(value, tuple) else value

    def follow(self, result: Any) -> None:
        """Run the operator again, and compare each tensor that it made or changed."""
        mode, operator = self._mode, self.operator
        outputs = tensors_in(result)
        targets = self._written or outputs
        if not self._written and outputs and self._is_alias(outputs):
            return
        made = mode.operation(operator)
        made.inputs, made.has_infinite_argument = self._inputs, self._infinite
        made.power = self._power(made)
        shadows = self._rerun(made, outputs)
        for index, tensor in enumerate(targets[: RESULTS.get(operator.name)]):
            if tensor.layout is torch.strided and _has_numbers(tensor):
                self._compare(made, tensor, index, shadows)
        for tensor in self._running_statistics():
            entry = self._changed(made, tensor)
            if (facts := examine(tensor, None)) is not None:
                self._record(made, tensor, entry, facts)

    def _running_statistics(self) -> list[Tensor]:
        """Return the tensors that a batch norm changes, although its schema does not say so."""
        if not self.operator.is_batch_norm:
            return []
        return tensors_in([self._actual[i] for i in RUNNING_STATISTICS if i < len(self._actual)])

    def _is_alias(self, outputs: list[Tensor]) -> bool:
        """Return whether the results are views that the schema does not declare, as of detach."""
        storages = {tensor.untyped_storage()._cdata for tensor in self.tensors}
        return all(
            tensor.layout is torch.strided and tensor.untyped_storage()._cdata in storages
            for tensor in outputs
        )

    def _power(self, made: Operation) -> int | None:
        if made.is_backward:  # linear in the gradient that comes in
            return 1 if 1 in self._powers else 0 if not any(self._powers) else None
        second = self._args[1] if len(self._args) > 1 else None
        number = float(second) if isinstance(second, int | float) else None
        return result_power(self.operator.name, self._powers, number, self._mode.scale)

    def _rerun(self, made: Operation, outputs: list[Tensor]) -> list[Tensor] | None:
        """Return the shadows of the results; None if they equal them, or are unknown."""
        mode = self._mode
        if not self._is_rerun:
            is_random = self.operator.draws(self._actual, self._kwargs)
            made.is_unknown = not (self._may_run or is_random) and any(map(is_half, self.tensors))
            return None
        mode.reruns += 1
        try:
            shadows = tensors_in(self._func(*self._args, **self._kwargs))
        except Exception as error:
            mode._failed(self.operator.name, error)
            made.is_unknown = True
            for tensor in self._written:
                mode.memory.forget(tensor)
            return None
        if self._written and not outputs:
            return [mode.shadow(tensor) for tensor in self._written]
        return shadows

    def _compare(
        self, made: Operation, tensor: Tensor, index: int, shadows: list[Tensor] | None
    ) -> None:
        """Record what is wrong in a tensor that the operator made or changed."""
        mode, memory = self._mode, self._mode.memory
        if self._written:
            entry, shadow = self._changed(made, tensor), None
            if shadows is None:
                memory.forget(tensor)
            elif entry.values is not None:
                shadow = memory.shadow(tensor, entry)
        else:
            entry = memory.find(tensor) or memory.add(tensor)
            entry.writers, entry.is_suspect, entry.power = [made], False, made.power
            shadow = shadows[index] if shadows is not None and index < len(shadows) else None
            if shadow is not None and shadow.shape == tensor.shape:
                memory.assign(tensor, entry, shadow)
        made.dtype = made.dtype or tensor.dtype
        if self.operator.name in UNWRITTEN:
            return
        if is_half(tensor) and not made.is_backward:
            mode.half_operators += 1
        facts = examine(tensor, shadow)
        if facts is not None:
            self._record(made, tensor, entry, facts)

    def _record(self, made: Operation, tensor: Tensor, entry: Entry, facts: Facts) -> None:
        mode = self._mode
        if made.result is None or (facts.lost and not made.result.lost):
            made.result, made.dtype = facts, tensor.dtype
        if not tensor.dim() and facts.nonfinite and not made.is_backward and self.tensors:
            mode.scalars.append(made)
        entry.is_suspect |= bool(facts.nonfinite or facts.shadow_nonfinite)
        if facts.shadow_nonfinite:
            made.beyond_fp32 = self._beyond_fp32()
        has_lost_input = any(each.facts and each.facts.lost for each in self._inputs)
        if facts.lost and not has_lost_input and not made.is_first:
            made.is_first = True
            made.sample = self._sample(tensor)
            mode.first_lost.append(made)
            # Only now: is an input 0 that is another value in fp32?
            made.inputs = [
                Input(each.writers, each.facts or self._examined(tensor, entry))
                for each, tensor, entry in zip(
                    self._inputs, self.tensors, self._entries, strict=True
                )
            ]

    def _beyond_fp32(self) -> float | None:
        """Return the largest value in fp64 if all are finite there; None if not, or unknown."""
        mode = self._mode
        has_bad_input = any(each.facts and each.facts.shadow_nonfinite for each in self._inputs)
        may_run = self._may_run and not self._written and mode.fp64_runs < MOST_FP64_RUNS
        if has_bad_input or not may_run:
            return None
        mode.fp64_runs += 1
        try:
            args, kwargs = _doubled(self._args), _doubled(self._kwargs)
            results = [each for each in tensors_in(self._func(*args, **kwargs)) if each.numel()]
        except Exception:
            return None  # it has no kernel for fp64
        if not all(map(all_finite, results)):
            return None
        return max((float(each.abs().max()) for each in results), default=None)

    def _sample(self, result: Tensor) -> tuple[float, float] | None:
        """Return an input of a lost element and its shadow, if they differ."""
        is_lost = ~torch.isfinite(result) & torch.isfinite(self._mode.shadow(result))
        for tensor, entry in zip(self.tensors, self._entries, strict=True):
            if tensor.shape == result.shape and tensor.is_floating_point():
                value = float(tensor[is_lost].flatten()[0])
                shadow = float(self._mode.memory.shadow(tensor, entry)[is_lost].flatten()[0])
                if math.isfinite(value) and value != shadow:
                    return value, shadow
        return None

    def _examined(self, tensor: Tensor, entry: Entry) -> Facts | None:
        is_changed = any(tensor is written for written in self._written)
        return None if is_changed else examine(tensor, self._mode.memory.shadow(tensor, entry))

    def _changed(self, made: Operation, tensor: Tensor) -> Entry:
        mode = self._mode
        entry = mode.entry(tensor)
        entry.written_by(made)
        if not made.is_backward and mode.on_write is not None:
            mode.on_write(entry, made)
        entry.power = made.power
        return entry


def _has_numbers(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _doubled(value: Any) -> Any:
    """Return arguments with fp64 in place of fp32."""
    if isinstance(value, Tensor):
        return value.double() if value.dtype is torch.float32 else value
    if isinstance(value, dict):
        return {name: _doubled(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_doubled, value))
    return torch.float64 if value is torch.float32 else value


def _is_whole_finite(tensor: Tensor) -> bool:
    """Return whether all of a tensor's storage is known to be finite, not only this view."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    if elements == tensor.numel():
        return True
    if elements > LARGEST_SEARCH * tensor.numel():
        return False
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    whole.set_(tensor.untyped_storage())
    return all_finite(whole)
