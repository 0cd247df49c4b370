"""Derivatives that torch computes in another way under a dispatch mode. This module imports torch.

For a mode or a tensor subclass torch has formulas without `nonzero` and `masked_select`, which
round in another way. Such nodes of a graph run without the mode, as in a step that is not armed.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.autograd.graph import Node
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from halfstep.shadow.mode import ShadowMode
from halfstep.shadow.scale import UNKNOWN

#: That of a minimum, maximum or median of all elements differs by the sign of zeros only.
NODES = frozenset({"ProdBackward0", "ProdBackward1", "MaskedFillBackward1"})


def leave_to_torch(roots: Iterable[object], mode: ShadowMode) -> None:
    """Let such nodes of the roots' graph run without the mode."""
    nodes = [root.grad_fn for root in roots if isinstance(root, Tensor)]
    seen = set[Node]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [function for function, _ in node.next_functions]
        if node.name() in NODES:
            _NodeWithoutMode(node, mode)


class _NodeWithoutMode:
    def __init__(self, node: Node, mode: ShadowMode) -> None:
        self._mode, self._is_left = mode, False
        node.register_prehook(self._leave)
        node.register_hook(self._enter)

    def _leave(self, _gradients: object) -> None:
        stack = _get_current_dispatch_mode_stack()
        if stack and stack[-1] is self._mode:
            _pop_mode()
            self._is_left = True

    def _enter(self, results: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
        """Enter the mode again, which does not know how the node's results depend on the scale."""
        if not self._is_left:
            return
        self._is_left = False
        try:
            with DisableTorchFunction(), torch.no_grad():
                self._note([tensor for tensor in results if tensor is not None], gradients)
        except Exception as error:
            self._mode.record_failure("backward", error)
        _push_mode(self._mode)

    def _note(self, results: list[Tensor], gradients: Sequence[Tensor | None]) -> None:
        if _are_finite(gradients) and not _are_finite(results):
            self._mode.give_up()
            return
        for tensor in results:
            self._mode.entry(tensor).power = UNKNOWN


def _are_finite(tensors: Iterable[Tensor | None]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors if tensor is not None)
