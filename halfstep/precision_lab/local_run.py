"""A local run of a precision diff: one call of a module, repeated by itself.

It repeats the call in low precision on the reference's inputs. Each call of another module inside
it returns the reference's result instead of computing, so that the local error is that of the
module's own operations: of functions such as attention between its children. The same holds
backward, from the reference's gradients.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from halfstep.precision_lab.call_records import Call, Leaves, in_backward, intercept, is_float
from halfstep.precision_lab.dispatch_modes import HALF
from halfstep.precision_lab.error_statistics import Sums, compare, overflows, without_modes
from halfstep.precision_lab.parameter_gradients import as_real, parameters_below
from halfstep.precision_lab.passes import Setting
from halfstep.precision_lab.preservation import (
    Kept,
    preserve_attributes,
    set_torch_state,
    state_tensors,
    torch_state,
)


class Diverged(Exception):
    """A local run that does not call what the reference called."""


class LocalRun:
    """One call, repeated on the reference's inputs with the reference's results of its children."""

    def __init__(
        self,
        setting: Setting,
        states: list[list[Tensor]],
        call: Call,
        run: Callable[..., object],
        leaves: Leaves,
        dtypes: list[torch.dtype | None],
        only: set[int] | None = None,
    ) -> None:
        """leaves: of the arguments, for their structure.  dtypes: of the low-precision pass.

        only: ids of parameters whose gradients are computed, and no others, which takes less time.
        """
        self._setting, self._states, self._call, self._run = setting, states, call, run
        self._leaves, self._dtypes, self._only = leaves, dtypes, only
        self.why: str | None = None
        self.forward: Sums | None = None
        self.backward: Sums | None = None
        self.input_gradients: dict[int, Tensor] = {}  # scaled
        self.parameters: dict[int, Tensor] = {}  # their gradients by id
        self._next = 0  # child
        self._is_plain = False
        self._repeatable: dict[nn.Module, list[object]] = {}  # results by child
        #: Where gradients start, and these; where they are measured, and the reference's.
        self._starts: list[GradientEdge] = []
        self._start_gradients: list[Tensor] = []
        self._ends: list[Tensor] = []
        self._end_references: list[Tensor] = []
        self._end_inputs: list[int | None] = []
        self._beyond: list[Tensor] = []  # whether a cast of a finite number was infinite

    def attempt(self, kind: str) -> list[object] | None:
        """Run and measure; return the results, or None with the reason in `why`.

        kind: "low"; "fp32": the module computes in fp32 what arrives in low precision;
        "reference": all in the reference's precision.
        """
        self._kind = kind
        setting, call = self._setting, self._call
        is_random = len(self._states) > 1
        before = torch_state(setting.devices) if is_random else []
        modules = [] if call.module is None else [call.module]
        try:
            with ExitStack() as stack:
                has_gradients = bool(call.output_gradients) or any(
                    child.input_gradients for child in call.children if child
                )
                stack.enter_context(torch.set_grad_enabled(has_gradients))
                stack.enter_context(saved_tensors_hooks(Tensor.detach, _same))
                stack.enter_context(preserve_attributes(modules))
                stack.enter_context(intercept(self._call_module))
                casts: dict[int, object] = {}
                if kind != "low":
                    own = setting.modules if call.module is None else list(call.module.modules())
                    casts = stack.enter_context(setting.in_reference(own))
                if any(kept.is_written for kept in call.state.values()):
                    for module in modules:
                        for values, name, now in state_tensors(module):
                            kept = call.state.get(name)
                            if kept is not None and kept.is_written:
                                values[name] = kept.tensor.to(now.dtype, copy=True)
                if is_random:
                    set_torch_state(setting.devices, self._states[call.random[0]])
                return self._measure(casts)
        except Exception as error:  # of the model's code, in a situation that it does not expect
            text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            self.why = self.why or f"it cannot be repeated: {text}"
            return None
        finally:
            if is_random:
                set_torch_state(setting.devices, before)

    def _measure(self, casts: Mapping[int, object]) -> list[object] | None:
        call = self._call
        args, kwargs = self._leaves.rebuild(self._inputs())
        outputs = Leaves(self._run(*args, **kwargs)).flat
        references = [kept.tensor if isinstance(kept, Kept) else kept for kept in call.outputs]
        if self._next != len(call.children) or len(outputs) != len(references):
            raise Diverged("it calls other modules on the same inputs")
        pairs = [
            (v, r) for v, r in zip(outputs, references, strict=True) if is_float(v) and is_float(r)
        ]
        with without_modes():
            self.forward = compare([v for v, _ in pairs], [r for _, r in pairs])
        for index, value in enumerate(outputs):
            gradient = call.output_gradients.get(index)
            if is_float(value) and value.requires_grad and gradient is not None:
                self._starts.append(get_gradient_edge(value))
                low = call.output_dtypes[index]
                self._start_gradients.append(self._scale(gradient, value, low))
        if self._starts:
            self._go_back(casts)
        if self._beyond and bool(torch.stack(self._beyond).any()):
            self.why = "one of its inputs exceeds the format's largest number"
            return None
        return [v.detach() if isinstance(v, Tensor) else v for v in outputs]

    def missing(self, other: "LocalRun") -> dict[int, Tensor]:
        """Return what is to be added to the parameters' gradients for those of another run."""
        pairs = ((k, g, other.parameters.get(k)) for k, g in self.parameters.items())
        return {key: right - own for key, own, right in pairs if right is not None}

    def _go_back(self, casts: Mapping[int, object]) -> None:
        """Compare the gradients of the inputs and of the children's results."""
        setting = self._setting
        original = {id(cast): key for key, cast in casts.items()}
        used = {original.get(id(p), id(p)): p for p in parameters_below(self._starts)}
        keys = setting.parameters.keys() if self._only is None else self._only
        used = {key: p for key, p in used.items() if key in keys}
        targets = [*self._ends, *used.values()]
        if not targets:
            return
        # An attribute may lead into the graph of the pass around this run, which still needs it.
        results = torch.autograd.grad(
            self._starts, targets, self._start_gradients, allow_unused=True, retain_graph=True
        )
        scale = setting.scale if self._kind == "low" else 1.0
        with without_modes():
            self.backward = compare(results[: len(self._ends)], self._end_references, scale=scale)
            for key, gradient in zip(used, results[len(self._ends) :], strict=True):
                if gradient is not None:
                    self.parameters[key] = as_real(gradient).to(setting.reference) / scale
        for index, gradient in zip(self._end_inputs, results, strict=False):
            if index is not None and gradient is not None:
                self.input_gradients[index] = gradient.detach()  # in half precision half as large

    def _inputs(self) -> list[object]:
        call, values = self._call, list[Any]()
        stand_ins: dict[Kept, Tensor] = {}  # the same tensor twice is one
        for index, kept in enumerate(call.inputs):
            if not isinstance(kept, Kept):
                values.append(self._leaves.flat[index])  # not a tensor: as in this pass
                continue
            if kept not in stand_ins:
                gradient = call.input_gradients.get(index)
                low = self._dtypes[index]
                if low is None and is_float(kept.tensor):
                    raise Diverged("its arguments differ in type from the reference's")
                stand_ins[kept] = self._stand_in(kept.tensor, gradient, low, index)
            values.append(stand_ins[kept])
        return values

    @without_modes()
    def _stand_in(
        self, reference: Tensor, gradient: Tensor | None, low: torch.dtype | None, index: int | None
    ) -> Tensor:
        """Return a copy of a reference's tensor in this run's precision, with a gradient if it has.

        index: position of an input; None: a child's result, which fp32 would also improve.
        """
        value = reference
        if low is not None and (
            self._kind == "low" or (self._kind == "fp32" and index is not None)
        ):
            value = self._round(reference, low)
        if low is not None and self._kind != "low":
            value = value.to(self._setting.reference)
        if gradient is None or self._only is not None:
            return value.detach().clone()
        end = value.detach().requires_grad_()
        self._ends.append(end)
        self._end_references.append(gradient)
        self._end_inputs.append(index)
        return end.clone()  # an in-place operation may overwrite it

    @without_modes()
    def _scale(self, gradient: Tensor, value: Tensor, low: torch.dtype | None) -> Tensor:
        """Return a reference's gradient as it would arrive at a tensor of this run."""
        if self._kind == "reference" or low is None:
            return gradient.to(value.dtype)
        rounded = self._round(gradient * self._setting.scale, low)
        return rounded if self._kind == "low" else (rounded.to(value.dtype) / self._setting.scale)

    def _round(self, value: Tensor, low: torch.dtype) -> Tensor:
        rounded = value.to(low)
        if low in HALF and (beyond := overflows(value, rounded)) is not None:
            self._beyond.append(beyond)
        return rounded

    def _call_module(
        self, module: nn.Module, run: Callable[..., object], args: Any, kwargs: Any
    ) -> object:
        """Return the reference's result of a child instead of calling it."""
        if self._is_plain or module not in self._setting.names:
            return run(*args, **kwargs)
        if in_backward():
            [result] = self._repeatable.get(module, [None, None])
            return result
        children = self._call.children
        if self._next >= len(children):
            raise Diverged("it calls other modules on the same inputs")
        child = children[self._next]
        self._next += 1
        if child is None:
            self._is_plain = True
            try:
                return run(*args, **kwargs)
            finally:
                self._is_plain = False
        if child.module is not module or child.result is None:
            raise Diverged("it calls other modules on the same inputs")
        given = Leaves((args, kwargs)).flat
        self._begin_at(child, given)
        if len(self._states) > 1:
            set_torch_state(self._setting.devices, self._states[child.random[1]])
        result = child.result.rebuild(self._results(child, given))
        self._repeatable.setdefault(module, []).append(result)
        return result

    def _begin_at(self, child: Call, given: list[object]) -> None:
        """Start gradients at the arguments of a child, whose gradients the reference knows."""
        for index, gradient in child.input_gradients.items():
            value = given[index] if index < len(given) else None
            if is_float(value) and value.requires_grad and value.shape == gradient.shape:
                self._starts.append(get_gradient_edge(value))
                low = value.dtype if self._kind == "low" else None
                self._start_gradients.append(self._scale(gradient, value, low))

    def _results(self, child: Call, given: list[Any]) -> list[object]:
        results: list[object] = []
        for index, kept in enumerate(child.outputs):
            if not isinstance(kept, Kept):
                results.append(kept)
                continue
            gradient = child.output_gradients.get(index)
            low = child.output_dtypes[index] if is_float(kept.tensor) else None
            value = self._stand_in(kept.tensor, gradient, low, None)
            at = child.overwritten.get(index)
            if at is not None and given[at].shape == value.shape:
                value = given[at].copy_(value)
            results.append(value)
        return results


def _same(tensor: Tensor) -> Tensor:
    return tensor
