"""The pass of a precision diff in low precision, whose calls are compared and repeated."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.precision_lab.call_records import Call, Leaves, intercept, is_float
from halfstep.precision_lab.error_statistics import (
    Sums,
    compare,
    errors_of,
    sum_squared_differences,
    without_modes,
)
from halfstep.precision_lab.local_run import LocalRun
from halfstep.precision_lab.parameter_gradients import gradients_of
from halfstep.precision_lab.passes import MOST_CALLS, Pass, Setting
from halfstep.precision_lab.preservation import Kept
from halfstep.precision_lab.reference_pass import ReferencePass
from halfstep.precision_lab.suggestions import NOISE_UNITS
from halfstep.precision_lab.watched_inputs import WatchedInputs

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
        self, call: Call, run: Callable[..., object], leaves: Leaves, values: list[object]
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
    ) -> list[object] | None:
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
    def _suspicions(self, call: Call, local: LocalRun) -> tuple[bool, set[int]]:
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

    def _repeats(self, local: LocalRun, exact: LocalRun) -> bool:
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


def add(sums: dict[int, Tensor], gradients: Mapping[int, Tensor]) -> None:
    """Add gradients to sums."""
    for key, gradient in gradients.items():
        sums[key] = sums[key] + gradient if key in sums else gradient
