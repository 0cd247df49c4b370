"""Tensors on their way to the host: copied behind the work already queued, and never waited for.

This module imports torch.
"""

from collections import deque
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor


class HostCopy:
    """Copies of tensors in host memory, complete once they have arrived."""

    def __init__(self, tensors: list[Tensor], arrived: "torch.cuda.Event | None") -> None:
        self.tensors = tensors
        self._arrived = arrived

    @classmethod
    def send(cls, *tensors: Tensor) -> Self:
        """Start the copies. Of tensors in host memory there are none: nobody may change them."""
        if not any(tensor.is_cuda for tensor in tensors):
            return cls(list(tensors), None)
        host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for target, source in zip(host, tensors, strict=True):
            target.copy_(source, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # On their device's stream, be another the current one.
        device = next(tensor.device for tensor in tensors if tensor.is_cuda)
        arrived.record(torch.cuda.current_stream(device))
        return cls(host, arrived)

    def has_arrived(self) -> bool:
        """Ask, without a wait."""
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait for the device."""
        if self._arrived is not None:
            self._arrived.synchronize()


class HostCopies:
    """Parcels on their way, each with what is to be done with it once it is there."""

    def __init__(self) -> None:
        #: Not reported yet.
        self.sent: deque[tuple[HostCopy, Callable[[list[Tensor]], None]]] = deque()

    def send(self, report: Callable[[list[Tensor]], None], *tensors: Tensor) -> None:
        """Start the copies; `report` is to be called with them."""
        self.sent.append((HostCopy.send(*tensors), report))

    def report(self, *, wait: bool = False) -> None:
        """Report what has arrived, in the order sent; or wait for the device, and report all."""
        while self.sent and (wait or self.sent[0][0].has_arrived()):
            host_copy, report = self.sent.popleft()
            host_copy.wait()
            report(host_copy.tensors)
