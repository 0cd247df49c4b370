"""One call of an operator in a shadow step, and its second run. This module imports torch."""

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _current_graph_task_id

from halfstep.shadow.arguments import adapt, map_tensors
from halfstep.shadow.facts import Facts, examine, examine_all
from halfstep.shadow.lines import place_of_caller
from halfstep.shadow.lost_updates import Lasting, keep_lasting
from halfstep.shadow.memory import SHADOW_DTYPES, Entry, ShadowMemory
from halfstep.shadow.operations import OUTSIDE, Input, Operation
from halfstep.shadow.operators import (
    CLEARING,
    DIFFERENCES,
    DIVIDING,
    DRAWS,
    MOVES,
    MULTIPLYING,
    PRODUCTS_OF_TWO,
    RESULTS,
    SELECTIONS,
    UNWRITTEN,
    ZERO_TESTS,
    Operator,
    has_numbers,
    has_opaque_state,
    is_half,
    is_readable,
    tensors_in,
)
from halfstep.shadow.reproduction import reproduction
from halfstep.shadow.scale import UNKNOWN, Power, ScaleExperiment
from halfstep.shadow.second_runs import SecondRuns

if TYPE_CHECKING:
    from halfstep.shadow.mode import ShadowMode

MOST_FP64_RUNS = 20  # of a step
DIFFERENT_INTEGERS = 0.01  # share of a tensor
MOST_TEXT = 200  # characters of an error
MOST_KEPT = 3  # operators of a step whose inputs are kept
MOST_MEASURED = 10_000_000  # elements of a result whose rounding is measured
NO_PASS = -1  # number of the graph task outside of a backward pass


class Rejection(NamedTuple):
    """An operator that raised, and does not with the values of fp32."""

    operation: Operation
    error: str
    value: float  # the element of its inputs that is farthest from fp32
    value_fp32: float
    maker: Operation  # of that input


class Call:
    """One call of an operator: its inputs before it, and its second run after it."""

    def __init__(
        self,
        mode: "ShadowMode",
        func: Callable[..., object],
        operator: Operator,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        tensors: list[Tensor],  # all of the arguments, in order
    ) -> None:
        self._mode, self._func, self.operator, self.tensors = mode, func, operator, tensors
        self._actual, self._args = args, args
        self._actual_kwargs, self._kwargs = kwargs, kwargs
        memory = mode.memory
        is_selection = operator.name in SELECTIONS
        self._entries = [mode.entry(tensor, is_part=is_selection) for tensor in tensors]
        self._operands = list(zip(tensors, self._entries, strict=True))
        has_half = not is_selection and any(map(is_half, (*tensors, *args, *kwargs.values())))
        is_affected = has_half or any(entry.values is not None for entry in self._entries)
        self._may_run = (
            operator.is_known
            and not operator.draws(args, kwargs)
            and not has_opaque_state(operator, tensors)
        )
        self._is_rerun = is_affected and self._may_run
        self._lasting: list[Lasting] = []  # tensors that are changed for the first time
        self._written = operator.find_written_tensors(args, kwargs)
        self._inputs = [self._input(tensor, entry) for tensor, entry in self._operands]
        self._is_of_scale = operator.name not in CLEARING and any(
            entry.power != 0 or entry.is_of_scale for entry in self._entries
        )
        self._power = self._measure_power()
        numbers = [a for a in (*args, *kwargs.values()) if isinstance(a, float)]
        self._infinite, self._nan = any(map(math.isinf, numbers)), any(map(math.isnan, numbers))
        if self._is_rerun:
            for tensor in self._written:
                if tensor.is_floating_point() or tensor.is_complex():
                    memory.materialize(tensor, mode.entry(tensor))
            source = args[1:2] if operator.name == "copy_" else ()
            written = zip(self._written, map(mode.entry, self._written), strict=True)
            self._lasting = keep_lasting(mode.lasting, memory, written, source)
            own = map_tensors(args, self._shadow_of, SHADOW_DTYPES)
            self._args = adapt(operator, own)
            self._kwargs = map_tensors(kwargs, self._shadow_of, SHADOW_DTYPES)
        self._runs = SecondRuns(
            func,
            operator,
            (args, kwargs),
            (self._args, self._kwargs),
            may_run=self._may_run and not self._written,
        )
        if mode.measures and has_half and self._may_run and self._written:
            self._runs.keep_before()
        self._repaired: tuple[object, object] | None = None
        if mode.repair is not None and self._may_run and _current_graph_task_id() == NO_PASS:
            try:
                self._repaired = mode.repair.arguments(
                    operator, tensors, self._written, args, kwargs
                )
            except Exception:  # too large, or a storage of another dtype: the step goes on without
                mode.repair = None

    def _input(self, tensor: Tensor, entry: Entry) -> Input:
        facts, entry.writers[-1].is_read = None, True
        if entry.is_suspect and not entry.is_unread:
            facts = examine(tensor, self._mode.memory.shadow(tensor, entry))
            if facts is not None and facts.nonfinite and len(entry.writers) == 1:
                self._mode.read(tensor, entry, facts)
        return Input(entry.writers, facts)

    def _measure_power(self) -> Power:
        """Return how the results will depend on the loss scale, before the operator runs."""
        if not self._is_of_scale:
            return 0
        is_in_pass = _current_graph_task_id() != NO_PASS
        is_linear = is_in_pass and not place_of_caller(is_backward=True).line  # not of the script
        if is_linear or not self._may_run:  # in the gradient that comes in
            powers = {entry.power for entry in self._entries if entry.power != 0}
            if is_linear and powers == {1} and _adds_unscaled(self.operator, self._operands):
                return None
            return 0 if not powers else powers.pop() if len(powers) == 1 else UNKNOWN
        find = self._mode.memory.find
        return ScaleExperiment(
            self._func,
            self.operator,
            self._actual,
            self._actual_kwargs,
            lambda tensor: 0 if (entry := find(tensor)) is None else entry.power,
            lambda tensor: (entry := find(tensor)) is None or entry.writers[0].name == OUTSIDE,
            self._mode.scale,
        ).result_power()

    def reject(self, error: Exception) -> Rejection | None:
        """Return what the operator has raised for its values; None if it is not due to them.

        It is not where it raises for those of fp32, too, or where it has no kernel for half
        precision.
        """
        if not self._is_rerun or isinstance(error, MemoryError) or not self._runs.needs_fp32():
            return None
        farthest = _find_farthest(self._mode.memory, self._operands)
        text = f"{type(error).__name__}: {error}"[:MOST_TEXT]
        return farthest and Rejection(self._mode.operation(self.operator), text, *farthest)

    def _shadow_of(self, tensor: Tensor) -> Tensor:
        has_shadow = has_numbers(tensor) or self._mode.memory.has_shadow(tensor)
        return self._mode.shadow(tensor) if has_shadow else tensor

    def follow(self, result: Any) -> None:
        """Run the operator again, and compare each tensor that it made or changed."""
        mode, operator = self._mode, self.operator
        outputs = tensors_in(result)
        targets = self._written or outputs
        if not operator.is_known:  # it may change what its schema does not declare
            for tensor in self.tensors:
                mode.memory.forget(tensor)
        if not self._written and outputs and _are_views(outputs, self.tensors):
            return
        made = mode.operation(operator)
        made.inputs = self._inputs
        made.has_infinite_argument, made.has_nan_argument = self._infinite, self._nan
        is_stale = not made.is_backward and any(map(mode.casts.is_stale, self.tensors))
        if is_stale and mode.on_stale_cast is not None:
            mode.on_stale_cast(made)
        made.root = _find_root(made, targets)
        made.power, made.is_of_scale = self._power, self._is_of_scale
        made.factor = _find_factor(operator, self._actual, outputs, self._operands)
        made.multiplier = _find_multiplier(operator, self._actual)
        shadows = self._rerun(made, outputs)
        if self._repaired is not None and mode.repair is not None:
            try:
                mode.repair.follow(self._func, self._repaired, outputs, self._written)
            except Exception:  # there is no kernel for these dtypes
                mode.repair = None
        made_tensors: list[tuple[Tensor, Entry, Tensor | None]] = []
        for index, tensor in enumerate(targets[: RESULTS.get(operator.name)]):
            if is_readable(tensor) and has_numbers(tensor):
                made_tensors.append((tensor, *self._record_result(made, tensor, index, shadows)))
            elif self._written and is_readable(tensor):
                mode.memory.forget(tensor)  # numbers changed as integers
            elif shadows is not None and operator.name == "_to_copy" and not made.is_backward:
                self._compare_integers(made, tensor, shadows[index])
            if shadows is not None and tensor.dtype is torch.bool and is_readable(tensor):
                self._compare_mask(made, tensor, shadows[index])
            if made.power is None and is_readable(tensor) and not has_numbers(tensor):
                entry = mode.memory.find(tensor) or mode.memory.add(tensor)
                # A mask that another scale would change.
                entry.writers, entry.power, entry.is_of_scale = [*entry.writers, made], None, True
        self._compare(made, made_tensors)
        if not (made.is_backward or made.place.caller_line):  # not of a package's optimizer
            for lasting in self._lasting:
                lasting.record_write(made, mode.memory)
        # A batch norm changes its running statistics, although its schema does not say so.
        for tensor in tensors_in(
            [a for i, a in enumerate(self._actual) if i in operator.statistics]
        ):
            entry = self._record_change(made, tensor)
            if (facts := examine(tensor, None)) is not None:
                self._record(made, tensor, entry, facts)
        made.is_tainted = made.result is not None or any(
            operand.facts is not None or any(writer.is_tainted for writer in operand.writers)
            for operand in made.inputs
        )
        is_edit = made.is_of_scale and (made.power is None or not made.is_backward)
        if not (made.is_tainted or is_edit or mode.measures or operator.name in MOVES):
            made.inputs = []  # nothing leads back through it

    def _rerun(self, made: Operation, outputs: list[Tensor]) -> list[Tensor] | None:
        """Return the shadows of the results; None if they equal them, or are unknown."""
        mode = self._mode
        if not self._is_rerun:
            is_random = self.operator.draws(self._actual, self._kwargs)
            has_half = any(map(is_half, self.tensors))
            is_draw = self.operator.name in DRAWS
            made.is_zero_drawn = is_draw and any(is_half(t) and not t.all() for t in outputs)
            made.is_unknown = not (self._may_run or is_random) and has_half
            return None
        try:
            shadows = tensors_in(self._func(*self._args, **self._kwargs))
        except Exception as error:
            mode.record_failure(self.operator.name, error)
            made.is_unknown = True
            for tensor in self._written:
                mode.memory.forget(tensor)
            return None
        if self._written and not outputs:
            return [mode.shadow(tensor) for tensor in self._written]
        return shadows

    def _record_result(
        self, made: Operation, tensor: Tensor, index: int, shadows: list[Tensor] | None
    ) -> tuple[Entry, Tensor | None]:
        """Record who made or changed a tensor; return what is known of it, and its shadow."""
        memory = self._mode.memory
        made.dtype = made.dtype or tensor.dtype
        if self._written:
            entry, shadow = self._record_change(made, tensor), None
            if shadows is None:
                memory.forget(tensor)
            elif entry.values is not None:
                shadow = memory.shadow(tensor, entry)
        else:
            entry = memory.find(tensor) or memory.add(tensor)
            entry.writers, entry.is_suspect, entry.power = [made], False, made.power
            entry.is_of_scale = made.is_of_scale
            shadow = shadows[index] if shadows is not None and index < len(shadows) else None
            if shadow is not None and shadow.shape == tensor.shape:
                memory.assign(tensor, entry, shadow)
        return entry, shadow

    def _compare(self, made: Operation, results: list[tuple[Tensor, Entry, Tensor | None]]) -> None:
        """Record what is wrong in the tensors that the operator made or changed."""
        mode = self._mode
        if self.operator.name in UNWRITTEN:
            return
        found = examine_all([(tensor, shadow) for tensor, _, shadow in results])
        for (tensor, entry, shadow), facts in zip(results, found, strict=True):
            if is_half(tensor) and not made.is_backward:
                mode.half_operators += 1
            if facts is not None:
                for part, unread in self._operands:
                    if unread.is_unread and facts.nonfinite:
                        mode.read(part, unread, facts)
                        made.inputs = [Input(unread.writers, facts), *made.inputs]
                self._record(made, tensor, entry, facts)
            is_measured = mode.measures and not made.is_backward and shadow is not None
            if is_measured and tensor.numel() <= MOST_MEASURED:
                made.own_error = max(made.own_error, self._runs.measure_error(tensor))

    def _compare_mask(self, made: Operation, mask: Tensor, shadow: Tensor) -> None:
        """Keep a mask that is another in fp32, since values became 0 in half precision."""
        value = self._actual[1] if self.operator.name in ZERO_TESTS else None
        is_test = isinstance(value, int | float) and value == 0
        follows = any(
            entry.values is not None and not has_numbers(tensor) for tensor, entry in self._operands
        )
        if (is_test or follows) and not torch.equal(mask, shadow):
            entry = self._mode.memory.find(mask) or self._mode.memory.add(mask)
            entry.writers = [made]
            self._mode.memory.assign(mask, entry, shadow)

    def _compare_integers(self, made: Operation, integers: Tensor, shadow: Tensor) -> None:
        """Keep an operator whose integers, as of an index, are others in fp32."""
        if is_readable(integers) and integers.dtype != torch.bool and integers.numel():
            share = float((integers != shadow).double().mean())
            if share > DIFFERENT_INTEGERS:
                made.dtype = next((t.dtype for t in self.tensors if is_half(t)), None)
                self._mode.integers.append((made, share))

    def _record(self, made: Operation, tensor: Tensor, entry: Entry, facts: Facts) -> None:
        mode = self._mode
        if made.result is None or (facts.lost and not made.result.lost):
            made.result, made.dtype = facts, tensor.dtype
        if not tensor.dim() and facts.nonfinite and not made.is_backward and self.tensors:
            mode.scalars.append(made)
        entry.is_suspect |= bool(facts.nonfinite or facts.shadow_nonfinite)
        if facts.flushed and self.operator.name in DIFFERENCES:
            shadow = mode.memory.shadow(tensor, entry)
            _find_rounded(mode.memory, made, self._operands, tensor, (tensor == 0) & (shadow != 0))
        has_bad_input = any(
            operand.facts and operand.facts.shadow_nonfinite for operand in self._inputs
        )
        if facts.shadow_nonfinite and not has_bad_input and mode.fp64_runs < MOST_FP64_RUNS:
            mode.fp64_runs += 1
            made.beyond_fp32 = self._runs.find_largest_in_fp64()
        has_lost_input = any(operand.facts and operand.facts.lost for operand in self._inputs)
        if facts.lost and not has_lost_input and not made.is_first:
            made.is_first = True
            made.is_own = self._runs.is_finite_in_fp32(tensor, mode.shadow(tensor))
            is_lost = ~torch.isfinite(tensor) & torch.isfinite(mode.shadow(tensor))
            made.sample = _find_rounded(mode.memory, made, self._operands, tensor, is_lost)
            mode.first_lost.append(made)
            if mode.keeps_inputs and not self._written and len(mode.reproductions) < MOST_KEPT:
                actual, exact = (self._actual, self._actual_kwargs), (self._args, self._kwargs)
                if (kept := reproduction(self._func, actual, exact)) is not None:
                    mode.reproductions.append((made, kept))
            # Only now: is an input 0 that is another value in fp32?
            made.inputs = [
                Input(operand.writers, operand.facts or self._examine(tensor, entry))
                for operand, tensor, entry in zip(
                    self._inputs, self.tensors, self._entries, strict=True
                )
            ]

    def _examine(self, tensor: Tensor, entry: Entry) -> Facts | None:
        is_changed = any(tensor is written for written in self._written)
        return None if is_changed else examine(tensor, self._mode.memory.shadow(tensor, entry))

    def _record_change(self, made: Operation, tensor: Tensor) -> Entry:
        mode = self._mode
        entry = mode.entry(tensor)
        entry.record_write(made)
        if not made.is_backward and mode.on_write is not None:
            mode.on_write(entry, made, tensor.numel())
        entry.power, entry.is_of_scale = made.power, made.is_of_scale
        return entry


def _are_views(outputs: list[Tensor], tensors: list[Tensor]) -> bool:
    """Return whether results are views that the schema does not declare, as of detach."""
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    return all(
        is_readable(tensor) and tensor.untyped_storage()._cdata in storages for tensor in outputs
    )


def _find_root(made: Operation, results: list[Tensor]) -> Operation | None:
    """Return the first operator that has led to results and whose own is in half precision."""
    roots = (writer.root for operand in made.inputs for writer in operand.writers)
    return next(filter(None, roots), made if any(map(is_half, results)) else None)


def _find_factor(
    operator: Operator,
    args: tuple[object, ...],
    outputs: list[Tensor],
    inputs: Iterable[tuple[Tensor, Entry]],
) -> float | None:
    """Return the number by which a loss was multiplied, if that is what the operator does."""
    is_of_loss = [output.numel() for output in outputs] == [1]
    if operator.name not in PRODUCTS_OF_TWO or not is_of_loss:
        return None
    if isinstance(second := args[1] if len(args) > 1 else None, int | float):
        return float(second)
    for tensor, entry in inputs:
        if tensor.numel() == 1 and entry.writers[0].name == OUTSIDE:
            return float(tensor)
    return None


def _find_multiplier(operator: Operator, args: tuple[object, ...]) -> float | None:
    """Return the number of Python by which an operator multiplies in place."""
    number = args[1] if len(args) > 1 else None
    if operator.name not in MULTIPLYING or not isinstance(number, int | float) or not number:
        return None
    return 1 / number if operator.name in DIVIDING else float(number)


def _adds_unscaled(operator: Operator, operands: Iterable[tuple[Tensor, Entry]]) -> bool:
    """Return whether a gradient of this pass that no scale has led to is added to another."""
    return operator.name == "add" and any(
        entry.power == 0
        and entry.writers[-1].is_backward
        and is_readable(tensor)
        and bool(tensor.any())
        for tensor, entry in operands
    )


def _find_farthest(
    memory: ShadowMemory, inputs: Iterable[tuple[Tensor, Entry]]
) -> tuple[float, float, Operation] | None:
    """Return the element of some inputs that is farthest from its shadow, that, and its maker."""
    found, largest = None, 0.0
    for tensor, entry in inputs:
        if entry.values is not None and tensor.is_floating_point() and tensor.numel():
            shadow = memory.shadow(tensor, entry)
            distance, at = (tensor - shadow).abs().flatten().max(0)
            if float(distance) > largest:
                largest, maker = float(distance), entry.writers[-1]
                while maker.name in MOVES and maker.inputs:
                    maker = maker.inputs[0].writers[-1]
                found = float(tensor.flatten()[at]), float(shadow.flatten()[at]), maker
    return found


def _find_rounded(
    memory: ShadowMemory,
    made: Operation,
    inputs: Iterable[tuple[Tensor, Entry]],
    result: Tensor,
    where: Tensor,
) -> tuple[float, float] | None:
    """Return a finite input of some elements and its shadow, if they differ.

    Its writers are kept: they have rounded it.
    """
    for tensor, entry in inputs:
        if tensor.shape == result.shape and tensor.is_floating_point():
            value = float(tensor[where].flatten()[0])
            shadow = float(memory.shadow(tensor, entry)[where].flatten()[0])
            if math.isfinite(value) and value != shadow:
                made.rounded = [writer for writer in entry.writers if writer is not made]
                return value, shadow
    return None
