"""Asynchronous copies of batches from the host to the device."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


class ToDevice:
    """Copies batches on its own CUDA stream; on a CPU no copy is needed."""

    def __init__(self, device: torch.device, *, pin: bool = False) -> None:
        """pin: copy batches to pinned memory first, so that the host does not wait."""
        self._device, self._pin = device, pin and device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, batch: Any) -> "OnTheWay":
        """Queue the copy of a batch; asynchronous if it is in pinned memory."""
        if self._stream is None:
            return OnTheWay(tree_map(self._move, batch), None)
        with torch.cuda.stream(self._stream):
            moved = tree_map(self._move, batch)
        return OnTheWay(moved, self._stream.record_event())

    def _move(self, leaf: object) -> object:
        if self._pin and isinstance(leaf, Tensor) and not leaf.is_cuda:
            leaf = leaf.pin_memory()
        return leaf.to(self._device, non_blocking=True) if hasattr(leaf, "to") else leaf


class OnTheWay:
    """A batch with a queued copy."""

    def __init__(self, batch: object, arrives: "torch.cuda.Event | None") -> None:
        self._batch, self._arrives = batch, arrives

    def take(self) -> Any:
        """Return the batch; work queued from now on waits for the copy, on the device."""
        if self._arrives is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self._arrives)
            for leaf in tree_leaves(self._batch):
                if isinstance(leaf, Tensor):
                    leaf.record_stream(stream)  # its memory belongs to the copying stream
        return self._batch
