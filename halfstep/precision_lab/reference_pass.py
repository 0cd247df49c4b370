"""The pass of a precision diff in the reference's precision."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from halfstep.precision_lab.call_records import Call, Leaves, intercept, is_float
from halfstep.precision_lab.parameter_gradients import check_loss, gradients_of
from halfstep.precision_lab.passes import MOST_CALLS, Pass, Setting
from halfstep.precision_lab.preservation import state_tensors, torch_state
from halfstep.precision_lab.suggestions import LOSS
from halfstep.precision_lab.watched_inputs import WatchedInputs


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

    def _cast(self, value: Any) -> object:
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
        self, call: Call, run: Callable[..., object], leaves: Leaves, values: Sequence[object]
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


def find_used_inside(results: Sequence[Any], inputs: Sequence[Any]) -> set[int]:
    """Return the positions of a call's results of which it computed another, or that it repeats."""
    edges = [(index, get_gradient_edge(v)) for index, v in enumerate(results) if _has_gradient(v)]
    if len(edges) < 2:
        return set()
    seen = {value.grad_fn for value in inputs if _has_gradient(value)}
    nodes: list[Any] = [edge.node for _, edge in edges]
    used: set[tuple[object, int]] = set()
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


def _has_gradient(value: object) -> bool:
    return is_float(value) and value.requires_grad
