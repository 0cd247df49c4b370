"""Arguments of a call of a module, whose gradients and changes are seen."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfstep.precision_lab.call_records import is_float


class WatchedInputs:
    """Arguments of a call, whose gradients through that call alone are reported.

    Each argument is replaced by a view of itself: the argument's own gradient contains other uses.
    """

    def __init__(self, values: Sequence[Any], store: Callable[[int, Tensor | None], None]) -> None:
        self.values: list[object] = []
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
