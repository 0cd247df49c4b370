"""The passes of a precision diff: the reference, the low precision, and local runs within it.

A *local run* repeats one call of a module in low precision on the reference's inputs. Each call of
another module inside it returns the reference's result instead of computing, so that the local
error is that of the module's own operations: of functions such as attention between its children.
The same holds backward, from the reference's gradients. This module imports torch.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from halfstep.precision_lab.call_records import Call, Leaves, in_backward, intercept, is_float
from halfstep.precision_lab.dispatch_modes import HALF, EqualOperations
from halfstep.precision_lab.error_statistics import (
    Sums,
    compare,
    errors_of,
    overflows,
    sum_squared_differences,
    without_modes,
)
from halfstep.precision_lab.preservation import (
    Kept,
    KeptTensors,
    cast_parameters,
    full_fp32,
    no_autocast,
    preserve_attributes,
    set_torch_state,
    state_tensors,
    torch_state,
)
from halfstep.precision_lab.suggestions import LOSS, NOISE_UNITS

#: Calls of one module that are recorded; an RNN may call a cell thousands of times.
MOST_CALLS = 64
#: Largest share of a local error that a repetition in the reference's precision may have.
REPEATABLE = 0.1
UNREPEATABLE = (
    "repeated in the reference's precision, it gives different numbers: it depends on more than "
    "its inputs, or more than its results is used"
)
UNVERIFIED = (
    "repeating the modules that use it in the reference's precision does not give its whole "
    "gradient: it is also used elsewhere, or not every call could be repeated"
)


class Diverged(Exception):
    """A local run that does not call what the reference called."""


class Setting:
    """Data shared by all passes of a diff."""

    def __init__(
        self,
        names: Mapping[nn.Module, str],
        device_type: str,
        devices: Sequence[torch.device],
        reference: torch.dtype,
        unit: float,
        scale: float,
    ) -> None:
        self.names, self.modules = names, list(names)
        self.device_type, self.devices = device_type, devices
        self.reference, self.unit, self.scale = reference, unit, scale
        self.kept = KeptTensors()
        self.reference_mode = EqualOperations(self.kept.before_write, reference)
        own = [p for m in self.modules for p in m._parameters.values() if p is not None]
        self.parameters = {id(parameter): parameter for parameter in own}
        self.tied = {key for key, uses in Counter(map(id, own)).items() if uses > 1}

    @contextmanager
    def in_reference(self, modules: Sequence[nn.Module]) -> Iterator[dict[int, Any]]:
        """Compute in the reference's precision; yield the cast parameters by the original's id."""
        casting = cast_parameters(modules, self.reference)
        with no_autocast(self.device_type), full_fp32(), self.reference_mode, casting as casts:
            yield casts


class Pass:
    """A forward and a backward pass whose calls of modules are intercepted."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._stack: list[Call] = []
        self._is_plain = False  # in a call that is not recorded

    def _call_module(
        self, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        is_repeated = in_backward()  # by activation checkpointing
        is_inside = self._stack or is_repeated
        if self._is_plain or module not in self._setting.names or not is_inside:
            return run(*args, **kwargs)
        leaves = Leaves((args, kwargs))
        values = [self._cast(value) for value in leaves.flat]
        if is_repeated:
            args, kwargs = leaves.rebuild(values)
            return run(*args, **kwargs)
        call = self._next_call(module)
        if call is None:
            self._is_plain = True
            try:
                args, kwargs = leaves.rebuild(values)
                return run(*args, **kwargs)
            finally:
                self._is_plain = False
        return self._record(call, run, leaves, values)

    def _cast(self, value: Any) -> Any:
        return value

    def _next_call(self, module: nn.Module) -> Call | None:
        raise NotImplementedError

    def _record(
        self, call: Call, run: Callable[..., Any], leaves: Leaves, values: list[Any]
    ) -> Any:
        raise NotImplementedError

    def _run(self, call: Call, run: Callable[..., Any], leaves: Leaves, values: list[Any]) -> Any:
        args, kwargs = leaves.rebuild(values)
        self._stack.append(call)
        try:
            return run(*args, **kwargs)
        finally:
            self._stack.pop()


class ReferencePass(Pass):
    """Records the calls of a pass in the reference's precision."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.calls: dict[nn.Module | None, list[Call]] = {}
        self.in_order: list[Call] = []
        self._has_begun = False  # the backward pass
        self.left_out = 0  # calls beyond MOST_CALLS
        self.states: list[list[Tensor]] = []  # of the random generators

    def run(self, loss_fn: Callable[[], Tensor]) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the loss, and the gradients by the id of the parameter."""
        setting = self._setting
        with setting.in_reference(setting.modules) as casts, intercept(self._call_module):
            loss = self._record(self._new(LOSS, None), loss_fn, Leaves(((), {})), [])
            check_loss(loss)
            self._has_begun = True
            parameters = {key: casts.get(key, p) for key, p in setting.parameters.items()}
            gradients = gradients_of(loss, parameters)
        return loss.detach(), gradients

    def _cast(self, value: Any) -> Any:
        is_other = is_float(value) and value.dtype != self._setting.reference
        return value.to(self._setting.reference) if is_other else value

    def _next_call(self, module: nn.Module) -> Call | None:
        if len(self.calls.get(module, ())) < MOST_CALLS:
            return self._new(self._setting.names[module], module)
        self.left_out += 1
        self._stack[-1].children.append(None)
        return None

    def _new(self, name: str, module: nn.Module | None) -> Call:
        earlier = self.calls.setdefault(module, [])
        call = Call(name, module, len(earlier) + 1)
        earlier.append(call)
        self.in_order.append(call)
        if self._stack:
            self._stack[-1].children.append(call)
        return call

    def _record(
        self, call: Call, run: Callable[..., Any], leaves: Leaves, values: list[Any]
    ) -> Any:
        keep = self._setting.kept.keep
        if call.module is not None:
            call.state = {key: keep(value) for _, key, value in state_tensors(call.module)}
        watched = WatchedInputs(values, partial(self._store, call.input_gradients))
        tensors = {id(v): v for v in watched.values if isinstance(v, Tensor)}
        inputs = {key: keep(tensor) for key, tensor in tensors.items()}
        call.inputs = [inputs.get(id(v), v) for v in watched.values]
        before = self._random()
        result = self._run(call, run, leaves, watched.values)
        call.random = before, self._random()
        written = watched.find_written()
        leaves = Leaves(result)
        if inner := find_used_inside(leaves.flat, watched.values):
            # Of the loss and the logits, say: views, whose gradients are those of uses outside.
            leaves.flat = [v.view_as(v) if i in inner else v for i, v in enumerate(leaves.flat)]
            result = leaves.rebuild(leaves.flat)
        for index, value in enumerate(leaves.flat):
            call.outputs.append(keep(value) if isinstance(value, Tensor) else value)
            if is_float(value):
                if (at := written.get(value.untyped_storage().data_ptr())) is not None:
                    call.overwritten[index] = at
                if value.requires_grad:
                    watched.watch(value, partial(self._store, call.output_gradients, index))
        call.result = leaves.without_values()
        return result

    def _store(self, gradients: dict[int, Tensor], index: int, gradient: Tensor | None) -> None:
        if self._has_begun and gradient is not None:  # kernels may yield none, as cuDNN's GRU does
            gradients.setdefault(index, gradient.detach())

    def _random(self) -> int:
        state = torch_state(self._setting.devices)
        if not self.states or not all(map(torch.equal, state, self.states[-1])):
            self.states.append(state)
        return len(self.states) - 1


class LowPass(Pass):
    """Compares a pass in low precision with the reference, call by call, and runs each locally."""

    def __init__(self, setting: Setting, reference: ReferencePass) -> None:
        super().__init__(setting)
        self._reference = reference
        self._counts: dict[nn.Module | None, int] = {}
        self.unmatched = 0  # calls that the reference does not have
        #: Sums of the parameters' gradients over the local runs, by the parameter's id, and what
        #: is to be added with the suspect modules in fp32.
        self.local: dict[int, Tensor] = {}
        self.local_sums: dict[int, Sums] = {}  # of those that one call uses, against the reference
        self.repairs: dict[int, Tensor] = {}
        self.exact: dict[int, Tensor] = {}  # to be added with them in the reference's precision
        self._has_begun = False  # the backward pass

    def run(
        self, loss_fn: Callable[[], Tensor], gradients: Mapping[int, Tensor]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the loss, and the scaled gradients by the id of the parameter.

        gradients: the reference's.
        """
        setting = self._setting
        self._gradients = gradients
        root = self._reference.in_order[0]
        with intercept(self._call_module):
            loss = self._record(root, loss_fn, Leaves(((), {})), [])
            self._has_begun = True
            own = gradients_of(
                loss * torch.full_like(loss, setting.scale, dtype=torch.float32), setting.parameters
            )
        return loss.detach(), own

    def _next_call(self, module: nn.Module) -> Call | None:
        number = self._counts[module] = self._counts.get(module, 0) + 1
        calls = self._reference.calls.get(module, ())
        if number <= len(calls):
            return calls[number - 1]
        self.unmatched += number <= MOST_CALLS
        return None

    def _record(
        self, call: Call, run: Callable[..., Any], leaves: Leaves, values: list[Any]
    ) -> Any:
        watched = WatchedInputs(values, partial(self._compare_gradient, call))
        result = self._run(call, run, leaves, watched.values)
        flat = Leaves(result).flat
        call.output_dtypes = [v.dtype if is_float(v) else None for v in flat]
        call.dtype = next((dtype for dtype in call.output_dtypes if dtype), None)
        measured = call.measured
        measured.is_called = True
        references = [kept.tensor if isinstance(kept, Kept) else kept for kept in call.outputs]
        if len(flat) != len(references):
            measured.why_unknown = "its results differ in structure from the reference's"
        else:
            pairs = [
                (v, r) for v, r in zip(flat, references, strict=True) if is_float(v) and is_float(r)
            ]
            with without_modes():
                measured.forward = compare([v for v, _ in pairs], [r for _, r in pairs])
            dtypes = [v.dtype if is_float(v) else None for v in values]
            with torch.no_grad():
                outputs = self._run_locally(call, run, leaves, dtypes)
                if outputs is not None:
                    local = [
                        v
                        for v, r in zip(outputs, references, strict=True)
                        if is_float(v) and is_float(r)
                    ]
                    with without_modes():
                        measured.forward_inherited = sum_squared_differences(
                            [v for v, _ in pairs], local
                        )
        call.release()
        return result

    def _run_locally(
        self, call: Call, run: Callable[..., Any], leaves: Leaves, dtypes: list[torch.dtype | None]
    ) -> list[Any] | None:
        """Measure the local errors of a call; return its local results, or None if unknown."""
        setting, measured = self._setting, call.measured
        if call.module is not None:  # those that it is known to use, should it not be repeated
            call.parameters = {id(p) for p in call.module._parameters.values()}
            call.parameters &= setting.parameters.keys()
        local = LocalRun(setting, self._reference.states, call, run, leaves, dtypes)
        if len(dtypes) != len(call.inputs):
            measured.why_unknown = "its arguments differ in structure from the reference's"
            return None
        outputs = local.attempt("low")
        if outputs is None:
            measured.why_unknown = local.why
            return None
        measured.local_forward, measured.local_backward = local.forward, local.backward
        call.local_gradients, call.parameters = local.input_gradients, set(local.parameters)
        add(self.local, local.parameters)
        has_wrong_results, wrong_parameters = self._suspicions(call, local)
        if has_wrong_results or wrong_parameters:
            only = None if has_wrong_results else wrong_parameters
            in_fp32 = LocalRun(setting, self._reference.states, call, run, leaves, dtypes, only)
            if in_fp32.attempt("fp32") is not None:
                measured.fp32_forward, measured.fp32_backward = in_fp32.forward, in_fp32.backward
                add(self.repairs, local.missing(in_fp32))
            exact = LocalRun(setting, self._reference.states, call, run, leaves, dtypes, only)
            repeated = exact.attempt("reference")
            if repeated is not None:
                add(self.exact, local.missing(exact))
            if has_wrong_results and (repeated is None or not self._repeats(local, exact)):
                measured.why_unknown = exact.why or UNREPEATABLE
        return outputs

    def why_unknown(self, key: int, local: Sums | None, whole: Tensor) -> str | None:
        """Return why the local error of a parameter's gradient is unknown; None if it is known.

        A small one shows itself that the local runs contain all uses. A large one is known if the
        same runs in the reference's precision give the reference's whole gradient.
        """
        for call in self._reference.in_order:
            if key in call.parameters and call.measured.why_unknown:
                return call.measured.why_unknown
        if local is None:
            return UNVERIFIED
        error = errors_of(local).error
        if error <= NOISE_UNITS * self._setting.unit:
            return None
        exact = self.exact.get(key)
        sums = None if exact is None else compare([self.local[key] + exact], [whole])
        allowed = max(REPEATABLE * error, self._setting.unit / 2)
        return None if sums and errors_of(sums).error <= allowed else UNVERIFIED

    @without_modes()
    def _suspicions(self, call: Call, local: "LocalRun") -> tuple[bool, set[int]]:
        """Return what has local errors above the noise; the host waits for the device.

        Whether the results or the gradients that the call passes back, and which parameters.
        """
        for key in local.parameters:
            self.local_sums.pop(key, None)
        if len(self._reference.calls[call.module]) == 1:
            # The gradient of a parameter that is used elsewhere too is a sum of several.
            for key, gradient in local.parameters.items():
                reference = self._gradients.get(key)
                is_whole = gradient is self.local[key] and key not in self._setting.tied
                if not is_whole or reference is None:
                    continue
                if sums := compare([gradient], [reference]):
                    self.local_sums[key] = sums
        limit = NOISE_UNITS * self._setting.unit
        results = [result for result in (local.forward, local.backward) if result]
        parameters = {k: self.local_sums[k] for k in local.parameters if k in self.local_sums}
        return (
            any(not errors_of(result).error <= limit for result in results),
            {
                key
                for key, parameter in parameters.items()
                if not errors_of(parameter).error <= limit
            },
        )

    def _repeats(self, local: "LocalRun", exact: "LocalRun") -> bool:
        for low, reference in ((local.forward, exact.forward), (local.backward, exact.backward)):
            if low and reference:
                allowed = max(REPEATABLE * errors_of(low).error, self._setting.unit / 2)
                if not errors_of(reference).error <= allowed:
                    return False
        return True

    @without_modes()
    def _compare_gradient(self, call: Call, index: int, gradient: Tensor | None) -> None:
        if not self._has_begun or gradient is None:  # before: of the loss function's own
            return
        reference = call.input_gradients.pop(index, None)
        if reference is None:
            return
        scale = self._setting.scale
        if (sums := compare([gradient], [reference], scale=scale)) is not None:
            call.measured.backward.append(sums)
        local = call.local_gradients.pop(index, None)
        if (
            local is not None
            and (squared := sum_squared_differences([gradient], [local])) is not None
        ):
            call.measured.backward_inherited.append(squared / scale / scale)


class WatchedInputs:
    """Arguments of a call, whose gradients through that call alone are reported.

    Each argument is replaced by a view of itself: the argument's own gradient contains other uses.
    """

    def __init__(self, values: Sequence[Any], store: Callable[[int, Tensor | None], None]) -> None:
        self.values: list[Any] = []
        seen: dict[int, Tensor] = {}
        self._originals: dict[int, Tensor] = {}  # by the id of the view
        self._versions: list[tuple[int, Tensor, int]] = []
        for index, value in enumerate(values):
            if not is_float(value):
                self.values.append(value)
                continue
            if id(value) not in seen:
                self._versions.append((index, value, value._version))
                seen[id(value)] = value
                if value.requires_grad and torch.is_grad_enabled():
                    view = seen[id(value)] = value.view_as(value)
                    base = value._base if value._is_view() else None
                    is_whole = base is not None and base.shape == value.shape
                    self._originals[id(view)] = base if base is not None and is_whole else value
                    self.watch(view, partial(store, index))
            self.values.append(seen[id(value)])

    def watch(self, tensor: Tensor, store: Callable[[Tensor | None], None]) -> None:
        """Report the gradient of a tensor.

        An in-place operation cuts a view from the graph: then the gradient of the original before
        that operation is reported.
        """
        tensor.register_hook(store)  # type: ignore[no-untyped-call]
        original = self._originals.get(id(tensor))
        if original is not None and not original.is_leaf:
            # An alias, with the same version: a hook that held its own tensor would never be freed.
            alias, version = original.detach(), original._version

            def store_if_written(gradient: Tensor | None) -> None:
                if alias._version != version:
                    store(gradient)

            original.register_hook(store_if_written)  # type: ignore[no-untyped-call]

    def find_written(self) -> dict[int, int]:
        """Return the positions of overwritten arguments by their memory; after the call."""
        return {
            value.untyped_storage().data_ptr(): index
            for index, value, version in self._versions
            if value._version != version
        }


class LocalRun:
    """One call, repeated on the reference's inputs with the reference's results of its children."""

    def __init__(
        self,
        setting: Setting,
        states: list[list[Tensor]],
        call: Call,
        run: Callable[..., Any],
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
        self._repeatable: dict[nn.Module, list[Any]] = {}  # results by child
        #: Where gradients start, and these; where they are measured, and the reference's.
        self._starts: list[GradientEdge] = []
        self._start_gradients: list[Tensor] = []
        self._ends: list[Tensor] = []
        self._end_references: list[Tensor] = []
        self._end_inputs: list[int | None] = []
        self._beyond: list[Tensor] = []  # whether a cast of a finite number was infinite

    def attempt(self, kind: str) -> list[Any] | None:
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
                casts: dict[int, Any] = {}
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

    def _measure(self, casts: Mapping[int, Any]) -> list[Any] | None:
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

    def _go_back(self, casts: Mapping[int, Any]) -> None:
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

    def _inputs(self) -> list[Any]:
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
        self, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
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

    def _begin_at(self, child: Call, given: list[Any]) -> None:
        """Start gradients at the arguments of a child, whose gradients the reference knows."""
        for index, gradient in child.input_gradients.items():
            value = given[index] if index < len(given) else None
            if is_float(value) and value.requires_grad and value.shape == gradient.shape:
                self._starts.append(get_gradient_edge(value))
                low = value.dtype if self._kind == "low" else None
                self._start_gradients.append(self._scale(gradient, value, low))

    def _results(self, child: Call, given: list[Any]) -> list[Any]:
        results: list[Any] = []
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


def find_used_inside(results: Sequence[Any], inputs: Sequence[Any]) -> set[int]:
    """Return the positions of a call's results of which it computed another, or that it repeats."""
    edges = [(index, get_gradient_edge(v)) for index, v in enumerate(results) if _has_gradient(v)]
    if len(edges) < 2:
        return set()
    seen = {value.grad_fn for value in inputs if _has_gradient(value)}
    nodes: list[Any] = [edge.node for _, edge in edges]
    used: set[tuple[Any, int]] = set()
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        following = [edge for edge in node.next_functions if edge[0] is not None]
        used |= set(following)
        nodes += [before for before, _ in following]
    ends = Counter((edge.node, edge.output_nr) for _, edge in edges)
    used |= {end for end, count in ends.items() if count > 1}
    return {index for index, edge in edges if (edge.node, edge.output_nr) in used}


def add(sums: dict[int, Tensor], gradients: Mapping[int, Tensor]) -> None:
    """Add gradients to sums."""
    for key, gradient in gradients.items():
        sums[key] = sums[key] + gradient if key in sums else gradient


def parameters_below(starts: Sequence[GradientEdge]) -> list[Tensor]:
    """Return the leaves of the graphs below some edges."""
    nodes: list[Any] = [start.node for start in starts]
    seen = set(nodes)
    leaves: list[Tensor] = []
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        following = {before for before, _ in node.next_functions} - seen
        seen |= following
        nodes += following
    return leaves


def check_loss(loss: object) -> None:
    """Raise TypeError or ValueError unless a loss function returned a loss."""
    if not isinstance(loss, Tensor):
        kind = type(loss).__name__
        raise TypeError(f"loss_fn returned {kind}: return the loss as a tensor of one element")
    if loss.numel() != 1:
        shape = tuple(loss.shape)
        raise ValueError(f"loss_fn returned a tensor of shape {shape}: return its mean or sum")
    if not loss.requires_grad:
        raise ValueError("the loss depends on no parameter that requires a gradient")


def gradients_of(loss: Tensor, parameters: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the gradients of those parameters that the loss depends on."""
    trained = {key: p for key, p in parameters.items() if p.requires_grad}
    try:
        results = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise ValueError(
            "the model uses activation checkpointing with use_reentrant=True, which computes no "
            "gradients without changing .grad: set use_reentrant=False"
        ) from error
    return {
        key: as_real(gradient)
        for key, gradient in zip(trained, results, strict=True)
        if gradient is not None
    }


def as_real(gradient: Tensor) -> Tensor:
    """Return a gradient of a parameter as a dense tensor of real numbers."""
    gradient = gradient.detach()
    if gradient.layout != torch.strided:  # for instance of an embedding with sparse=True
        gradient = gradient.to_dense()
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def _has_gradient(value: Any) -> bool:
    return is_float(value) and value.requires_grad


def _same(tensor: Tensor) -> Tensor:
    return tensor
