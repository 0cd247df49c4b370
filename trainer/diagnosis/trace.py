"""Trace: finds the operation and module that produce the first inf or NaN.

Forward, a dispatch mode observes every operation with its inputs and outputs, below autocast: an
fp16 tensor there was computed in fp16. Backward, each node of the autograd graph is hooked; a node
belongs to the module in whose call it was created. Operations with a nonfinite input are ignored,
including masks: `masked_fill(scores, mask, -inf)` has the inf as an argument.

The host waits at every operation, which is acceptable only for occasional steps.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep.telemetry.event_fields import Direction

OUTSIDE = "training_step"  # outside of any module's call: mostly the loss


class Finding(NamedTuple):
    """Origin of the first inf or NaN."""

    module: str  # "<module>.<submodule>", or OUTSIDE
    direction: Direction
    operation: str  # an ATen operation, such as "addmm", or a node, such as "AddmmBackward0"
    dtype: str  # of its result
    largest_input: float
    limit: float  # largest number of that dtype: 65504 in fp16


class Trace:
    """Traces modules while its context is active; `finding` is the first one."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.finding: Finding | None = None
        self._names = {
            child: f"{name}.{path}".rstrip(".")
            for name, module in modules.items()
            for path, child in module.named_modules()
        }
        self._calls: list[str] = []  # names of the modules being called, outermost first
        self._owners: dict[Node, str] = {}
        self._attached = ExitStack()

    def __enter__(self) -> Self:
        for module in self._names:
            for handle in (
                module.register_forward_pre_hook(self._enter_module, with_kwargs=True),
                # always_call: a module that raises must be removed from the calls too
                module.register_forward_hook(self._leave_module, always_call=True),
            ):
                self._attached.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._attached.close()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Observe the operations of a forward pass."""
        with _Operations(self):
            yield

    def backward(
        self, scaled_loss: Tensor, parameters: Sequence[Tensor], *, retain: bool = False
    ) -> tuple[Tensor | None, ...]:
        """Observe the nodes of a backward pass; return the gradients without accumulating them.

        parameters: those that are trained.  retain: keep the graph.
        """
        self._claim([scaled_loss], OUTSIDE)
        return torch.autograd.grad(scaled_loss, parameters, allow_unused=True, retain_graph=retain)

    def found(
        self,
        direction: Direction,
        operation: str,
        module: str,
        inputs: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
        """Store the finding, if it is the first."""
        if self.finding is None:
            culprit = next(t for t in outputs if not _is_finite(t))
            self.finding = Finding(
                module,
                direction,
                operation,
                str(culprit.dtype).removeprefix("torch."),
                max((float(t.abs().max()) for t in inputs if t.numel()), default=0.0),
                torch.finfo(culprit.dtype).max,
            )

    def module(self) -> str:
        """Return the name of the module being called."""
        return self._calls[-1] if self._calls else OUTSIDE

    def _enter_module(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._claim([args, kwargs], self.module())  # created by the caller
        self._calls.append(self._names[module])

    def _leave_module(self, module: nn.Module, _args: Any, output: Any) -> None:
        self._claim(output, self._calls.pop())

    def _claim(self, tree: Any, owner: str) -> None:
        """Assign an owner to all nodes below these tensors that have none."""
        nodes = [t.grad_fn for t in tree_leaves(tree) if isinstance(t, Tensor) and t.grad_fn]
        while nodes:
            node = nodes.pop()
            if node in self._owners or hasattr(node, "variable"):
                continue  # a parameter's own node outlives the pass: a hook would stay
            self._owners[node] = owner
            node.register_hook(self._node_hook(node.name(), owner))
            nodes += [before for before, _ in node.next_functions if before is not None]

    def _node_hook(self, name: str, owner: str) -> Callable[..., None]:
        def after_node(
            results: Iterable[Tensor | None], gradients: Iterable[Tensor | None]
        ) -> None:
            if self.finding is not None:
                return
            inputs, outputs = _floating(gradients), _floating(results)
            if _all_finite(inputs) and not _all_finite(outputs):
                self.found("backward", name, owner, inputs, outputs)

        return after_node


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Checks every operation of a forward pass until there is a finding."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name: str = func.overloadpacket.__name__
        # Of a gradient penalty: checked by hooks on nodes.
        is_backward = torch._C._current_graph_task_id() != -1
        if self._trace.finding is not None or is_backward or "empty" in name:
            return func(*args, **kwargs)
        arguments = tree_leaves([args, kwargs])
        # Before the call, because it may write into its inputs.
        inputs = _floating(arguments)
        innocent = not _all_finite(inputs) or any(
            isinstance(a, float) and not math.isfinite(a) for a in arguments
        )
        largest = [] if innocent else [t.detach().clone() for t in inputs]
        result = func(*args, **kwargs)
        outputs = _floating(tree_leaves(result))
        if not innocent and not _all_finite(outputs):
            self._trace.found("forward", name, self._trace.module(), largest, outputs)
        return result


def _floating(values: Iterable[Any]) -> list[Tensor]:
    tensors = [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]
    return [v._values() if v.is_sparse else v for v in tensors]


def _all_finite(tensors: list[Tensor]) -> bool:
    return all(_is_finite(tensor) for tensor in tensors)


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())
