"""Finds the origin of the first nonfinite value by hooks in one step after a skip.

In an armed step, hooks for all modules record which nodes of the graph each module creates, and
check outputs; hooks on the graph's nodes check the gradients that leave them. The first node in
order of execution with a nonfinite gradient is the origin. Its operation and dtype distinguish an
fp16 overflow (a linear operation or a cast, in half precision) from an undefined gradient (a root,
logarithm or division at 0, in any precision and at any scale). Without a skip there are no hooks.

Results stay on the device until the step's row closes. This module imports torch.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, cuda, nn
from torch._C._autograd import _get_sequence_nr
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from halfstep.evidence.operations import kind_of
from halfstep.evidence.source_files import is_of_script
from halfstep.telemetry import events
from halfstep.telemetry.events import Event
from halfstep.watching.async_host_copy import HostCopies, is_capturing
from halfstep.watching.current_step import Value
from halfstep.watching.headroom import has_compiled

MOST_NODES = 200_000  # of an armed graph
# Consecutive steps after a skip; the next larger number if the cause was not found.
ARMED_STEPS = (2, 32, 64)
ENOUGH = 2  # skips in armed steps
EARLY_SKIPS = 5  # consecutive; after these, skips with a likely cause are examined too
FEW = 0.5  # share of the parameters: above it, inf only does not prove an overflow
SOURCE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


FORWARD_KINDS: dict[str, Literal["inputs", "weights", "inside", "outside"]] = {
    "input": "inputs",
    "weight": "weights",
    "output": "inside",
    "part": "inside",
    "outside": "outside",
}


class Suspect(NamedTuple):
    """A node or a module's output, with the sum that shows whether it is finite."""

    name: str
    dtype: str
    total: Tensor
    module: str | None
    source: str | None
    # "node", "root", "input", "weight", "output" of one operation or "part" of a module of several
    part: str


class Origin:
    """Arms steps, and reports the origin."""

    def __init__(self, on_event: Callable[[Event], None], host_copies: HostCopies) -> None:
        self._on_event, self._host_copies = on_event, host_copies
        self._names: dict[nn.Module, str] = {}
        self.left = 0  # steps to arm
        self._skips = self._in_a_row = 0
        self._looks = 0  # index into ARMED_STEPS
        self._seen = 0  # skips in armed steps
        self._arm_at = 0  # number of skips from which on steps are armed again
        self.is_armed = False
        self._hooks: list[Any] = []
        self._handles: list[Any] = []
        self._has_anomaly_mode = False
        self._has_observed = False  # a module or a pass, since it was armed
        self._spans: list[tuple[int, int, str]] = []
        self._open: list[tuple[nn.Module, int]] = []
        self._forward: list[Suspect] = []
        self._backward: list[Suspect] = []
        self._largest: dict[tuple[str, str], Tensor] = {}  # by "input" or "weight", and module
        self._in_backward = False
        self._has_all_nodes = True

    def add(self, names: Mapping[nn.Module, str]) -> None:
        """Set the names of modules."""
        self._names |= names

    def stop(self) -> None:
        """Arm no more steps."""
        self.disarm()
        self.left, self._looks = 0, len(ARMED_STEPS)

    def applied(self) -> None:
        """Record a step that was not skipped."""
        self._in_a_row = 0

    def skipped(self, infinite: int, nan: int, parameters: int, *, loss_is_finite: bool) -> None:
        """Record a skip, and arm the next step if the cause is not evident.

        infinite, nan: numbers of parameters with inf only in their gradient, and with NaN.
        """
        self._skips += 1
        self._in_a_row += 1
        is_near_limit = loss_is_finite and not nan and infinite <= max(1, FEW * parameters)
        if is_near_limit and self._in_a_row <= EARLY_SKIPS:
            return
        if not self.left and self._skips >= self._arm_at and self._looks < len(ARMED_STEPS):
            self.left = ARMED_STEPS[self._looks]
            self._looks += 1

    def begin(self) -> None:
        """Arm the step that begins, if armed steps are left."""
        if self.left and not self.is_armed:
            self.left -= 1
            self.check()

    def check(self) -> None:
        """Arm the step that begins."""
        self.is_armed, self._has_observed = True, False
        self._spans, self._open, self._forward, self._backward = [], [], [], []
        self._largest = {}
        self._has_all_nodes = True
        if has_compiled():  # inner modules are not called, and torch warns of such hooks
            return
        self._hooks = [
            register_module_forward_pre_hook(self._enters),
            register_module_forward_hook(self._leaves),
        ]
        if not torch.is_anomaly_enabled():
            self._has_anomaly_mode = True  # nodes then record their source lines
            torch.set_anomaly_enabled(True, check_nan=False)

    def arm(self, roots: Any) -> None:
        """Register hooks on the graph of a backward pass that begins."""
        self._leave_anomaly_mode()
        self._in_backward = self._has_observed = True
        for root in roots:
            if isinstance(root, Tensor):
                self._note(self._backward, root, None, None, "root", "the scaled loss")
        for count, node in enumerate(_nodes(roots)):
            if count == MOST_NODES:
                self._has_all_nodes = False
                break
            self._handles.append(node.register_hook(partial(self._passed, node)))

    def passed(self) -> None:
        """Remove the graph's hooks."""
        self._in_backward = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def end(self, step: int, scale: Value, found_inf: Value, loss: Value) -> None:
        """End the armed step, if it has begun, and report its origin once the copy is complete.

        found_inf: whether the step was skipped; a NaN may have been masked on the way.
        """
        if not self.is_armed or not self._has_observed:
            return
        self.disarm()
        suspects = [*self._forward, *self._backward]
        forward = len(self._forward)
        self._forward, self._backward = [], []
        if not suspects and isinstance(found_inf, float) and not found_inf:
            return
        of_flag = found_inf.device if isinstance(found_inf, Tensor) else torch.device("cpu")
        device = suspects[0].total.device if suspects else of_flag
        numbers = [each.total.to(device, non_blocking=True) for each in suspects]
        numbers += [each.to(device, non_blocking=True) for each in self._largest.values()]
        numbers += [_tensor(each, device) for each in (scale, found_inf, loss)]
        measured, self._largest = list(self._largest), {}
        self._host_copies.send(
            partial(self._report, step, suspects, forward, measured, self._has_all_nodes),
            torch.stack(numbers).detach(),
        )

    def report(self) -> None:
        """Report completed copies of armed steps."""
        self._host_copies.report()

    def disarm(self) -> None:
        """Remove all hooks and restore anomaly mode."""
        self.is_armed = False
        self._leave_anomaly_mode()
        self.passed()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # ---- Hooks: their exceptions would end the script ------------------------------------------

    def _enters(self, module: nn.Module, inputs: Any) -> None:
        if self._in_backward or torch.compiler.is_compiling():
            return
        try:
            if cuda._initialized and is_capturing():
                return
            self._has_observed = True
            parent = self._name(self._open[-1][0]) if self._open else None
            is_first = parent is None and not self._spans
            self._open.append((module, _get_sequence_nr()))
            part = "input" if is_first else "outside" if parent is None else "part"
            for each in itertools.islice(_floats(inputs), 1):  # a mask of -inf may follow
                self._note(self._forward, each, parent, None, part, self._name(module))
                self._measure("input", self._name(module), each)
        except Exception:
            self._open.clear()

    def _leaves(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._in_backward or torch.compiler.is_compiling():
            return
        try:
            if cuda._initialized and is_capturing():
                return
            while self._open:
                entered, first = self._open.pop()
                if entered is module:
                    break
            else:
                return
            name = self._name(module)
            self._spans.append((first, _get_sequence_nr(), name))
            for parameter in module.parameters(recurse=False):
                self._note(self._forward, parameter, name, None, "weight", name)
                self._measure("weight", name, parameter)
            part = "output" if _is_one_operation(module) else "part"
            for each in _floats(output):
                self._note(self._forward, each, name, None, part, name)
        except Exception:
            self._open.clear()

    def _passed(self, node: Any, gradients: Any, _outputs: Any) -> None:
        try:
            for gradient in () if cuda._initialized and is_capturing() else gradients:
                if isinstance(gradient, Tensor):
                    module, source = self._module(node), _source(node)
                    self._note(self._backward, gradient, module, source, "node", node.name())
        except Exception:
            self.left = 0

    def _note(
        self,
        suspects: list[Suspect],
        tensor: Tensor,
        module: str | None,
        source: str | None,
        part: str,
        name: str,
    ) -> None:
        """Store the sum of a tensor, which is nonfinite if any of its elements is.

        Of tensors in host memory only the first nonfinite one is stored.
        """
        total = _total(tensor)
        if total is None or (total.is_cpu and math.isfinite(total.item())):
            return
        if total.is_cpu and any(each.part != "root" for each in suspects):
            return
        dtype = str(tensor.dtype).removeprefix("torch.")
        suspects.append(Suspect(name, dtype, total, module, source, part))

    def _measure(self, part: str, name: str, tensor: Tensor) -> None:
        """Store the largest size of a number among the tensors of a module's part."""
        values = _values(tensor)
        if values is not None and values.dtype.itemsize > 1:  # float8 has no norm
            largest = torch.linalg.vector_norm(values, math.inf).float()
            known = self._largest.get((part, name))
            self._largest[part, name] = (
                largest if known is None else torch.maximum(known, largest.to(known.device))
            )

    def _name(self, module: nn.Module) -> str:
        return self._names.get(module) or type(module).__name__

    def _module(self, node: Any) -> str | None:
        """Return the innermost module that created a node."""
        number = node._sequence_nr()
        inside = [
            (last - first, name) for first, last, name in self._spans if first <= number < last
        ]
        return min(inside)[1] if inside else None

    def _leave_anomaly_mode(self) -> None:
        if self._has_anomaly_mode:
            self._has_anomaly_mode = False
            torch.set_anomaly_enabled(False)

    def _report(
        self,
        step: int,
        suspects: list[Suspect],
        forward: int,
        measured: list[tuple[str, str]],  # the parts whose largest numbers follow the totals
        has_all_nodes: bool,  # else an earlier node may be the origin
        arrived: list[Tensor],
    ) -> None:
        *numbers, scale, found_inf, loss = arrived[0].tolist()
        if not found_inf:
            return
        totals = numbers[: len(suspects)]
        largest = dict(zip(measured, numbers[len(suspects) :], strict=True))
        self._seen += 1
        if self._seen >= ENOUGH:  # not again until there are ten times as many skips
            self._seen = self.left = self._looks = 0
            self._arm_at = 10 * self._skips
        bad = [
            (i < forward, each, total)
            for i, (each, total) in enumerate(zip(suspects, totals, strict=True))
            if not math.isfinite(total)
        ]
        outputs = [(each, total) for is_forward, each, total in bad if is_forward]
        nodes = [each for is_forward, each, _ in bad if not is_forward]
        is_forward = not math.isfinite(loss)  # else nonfinite values in the forward pass are masked
        if is_forward and outputs:
            self._on_event(_forward_origin(step, scale, *outputs[0], largest))
        elif is_forward:
            node = next((each for each in nodes if each.part == "node"), None)
            self._on_event(_unknown_origin(step, scale, "forward", "outside", node))
        elif not has_all_nodes:
            self._on_event(_unknown_origin(step, scale, "backward", "unobserved"))
        elif nodes:
            self._on_event(_backward_origin(step, scale, nodes[0]))
        else:
            self._on_event(_unknown_origin(step, scale, "backward", "elsewhere"))


def _forward_origin(
    step: int,
    scale: float,
    first: Suspect,
    total: float,
    largest: Mapping[tuple[str, str], float],
) -> events.Origin:
    """Return the event of the first tensor that is not finite.

    total: its sum.  largest: the largest sizes of numbers, by part and module.
    """
    return events.Origin(
        step=step,
        scale=scale,
        direction="forward",
        kind=FORWARD_KINDS[first.part],
        operation=None,
        dtype=first.dtype,
        module=first.module if first.part != "input" else first.name,
        source=None,
        largest_weight=largest.get(("weight", first.module or "")),
        largest_input=largest.get(("input", first.module or "")),
        may_be_undefined=first.part == "part" and math.isnan(total),
    )


def _backward_origin(step: int, scale: float, first: Suspect) -> events.Origin:
    kind = kind_of(first.name, first.dtype)
    if first.part == "root":
        kind = "overflow" if first.dtype == "float16" else "hidden"
    return events.Origin(
        step=step,
        scale=scale,
        direction="backward",
        kind=kind,
        operation=first.name[:200],
        dtype=first.dtype,
        module=first.module,
        source=first.source,
    )


def unobserved_origin(step: int, scale: float) -> events.Origin:
    """Return the event of a nonfinite loss for which neither modules nor inputs were examined."""
    return _unknown_origin(step, scale, "forward", "unobserved")


def _unknown_origin(
    step: int,
    scale: float,
    direction: events.Direction,
    kind: Literal["outside", "unobserved", "elsewhere"],
    nearest: Suspect | None = None,
) -> events.Origin:
    """Return an origin that is not observed itself. nearest: the first bad node after it."""
    return events.Origin(
        step=step,
        scale=scale,
        direction=direction,
        kind=kind,
        operation=nearest and nearest.name[:200],
        dtype=nearest and nearest.dtype,
        module=None,
        source=nearest and nearest.source,
    )


def _is_one_operation(module: nn.Module) -> bool:
    """Return whether a module is a layer of torch's own without further ones inside."""
    is_of_torch = type(module).__module__.startswith("torch.nn.")
    return is_of_torch and next(module.children(), None) is None


def _nodes(roots: Any) -> Iterator[Any]:
    """Yield the nodes that a backward pass from roots executes."""
    waiting = [root.grad_fn for root in roots if isinstance(root, Tensor) and root.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)


def _total(tensor: Tensor) -> Tensor | None:
    """Return the sum in fp32, to avoid overflow; None if the tensor has none."""
    values = _values(tensor)
    return None if values is None else values.sum(dtype=torch.float32)


def _values(tensor: Tensor) -> Tensor | None:
    """Return the local floating-point elements of a tensor; None if it has none."""
    values = tensor.detach()
    values = values.to_local() if hasattr(values, "to_local") else values
    values = values._values() if values.is_sparse else values
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if not values.is_floating_point() or not values.numel():
        return None
    return values


def _floats(values: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors among inputs or outputs."""
    if isinstance(values, Tensor):
        if values.is_floating_point():
            yield values
    elif isinstance(values, Mapping):
        yield from _floats(list(values.values()))
    elif isinstance(values, tuple | list):
        for each in values:
            yield from _floats(each)


def _source(node: Any) -> str | None:
    """Return the source line that created a node, as "file.py:12 in function", if known."""
    for frame in reversed(node.metadata.get("traceback_") or ()):
        match = SOURCE.search(frame)
        if match and is_of_script(match["file"]):
            name = Path(match["file"]).name
            return f"{name}:{match['line']} in {match['function']}"[:200]
    return None


def _tensor(value: Value, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().reshape(()).to(device, torch.float32, non_blocking=True)
    return torch.full((), value, device=device)
