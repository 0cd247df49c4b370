"""Asynchronous copies of tensors to the host, without waiting for the device.

This module imports torch.
"""

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Self

import torch
from torch import Tensor

#: Whether the script is capturing a CUDA graph, which a copy to the host would end. A builtin, as
#: each step calls it. It raises where CUDA is not initialized: `cuda._initialized` is asked first.
is_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", bool)

RELAXED = 2  # cudaStreamCaptureModeRelaxed
_thread = threading.local()


def has_arrived(event: torch.cuda.Event) -> bool:
    """Return whether an event is complete, in another thread than the loop's; False if unknown.

    Such a query would end the capture of a CUDA graph in the loop's thread, unless this thread's
    capture mode is relaxed.
    """
    if not hasattr(_thread, "is_relaxed"):
        _thread.is_relaxed = _relax_capture_mode()
    return _thread.is_relaxed and bool(event.query())  # type: ignore[no-untyped-call]


def _relax_capture_mode() -> bool:
    """Relax this thread's capture mode; return False if the CUDA runtime was not found."""
    major = (torch.version.cuda or "").partition(".")[0]
    with suppress(OSError, AttributeError):
        runtime = ctypes.CDLL(f"libcudart.so.{major}", mode=os.RTLD_NOLOAD)
        mode = ctypes.c_int(RELAXED)
        return bool(runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0)
    return False


class HostCopy:
    """Copies of tensors in host memory, valid once the transfer is complete."""

    def __init__(self, tensors: list[Tensor], arrived: "torch.cuda.Event | None") -> None:
        self.tensors = tensors
        self._arrived = arrived

    @classmethod
    def send(cls, *tensors: Tensor) -> Self:
        """Start the copies."""
        if not any(tensor.is_cuda for tensor in tensors):
            return cls([tensor.detach().clone() for tensor in tensors], None)
        # A script may have set another default device.
        host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True, device="cpu") for t in tensors]
        for target, source in zip(host, tensors, strict=True):
            target.copy_(source, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # on the current stream of the tensors' device, which need not be the current device
        device = next(tensor.device for tensor in tensors if tensor.is_cuda)
        arrived.record(torch.cuda.current_stream(device))
        return cls(host, arrived)

    def has_arrived(self) -> bool:
        """Return whether the copies are complete, without waiting."""
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait for the device."""
        if self._arrived is not None:
            self._arrived.synchronize()


class HostCopies:
    """Queue of copies in flight, each with a callback."""

    def __init__(self) -> None:
        #: Not reported yet.
        self.sent: deque[tuple[HostCopy, Callable[[list[Tensor]], None]]] = deque()

    def send(self, report: Callable[[list[Tensor]], None], *tensors: Tensor) -> None:
        """Start the copies; `report` is called with them once they are complete."""
        self.sent.append((HostCopy.send(*tensors), report))

    def report(self, *, wait: bool = False) -> None:
        """Call the callbacks of complete copies, in order.

        wait: wait for the device, and call all.
        """
        while self.sent and (wait or self.sent[0][0].has_arrived()):
            host_copy, report = self.sent.popleft()
            host_copy.wait()
            report(host_copy.tensors)
