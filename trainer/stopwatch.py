"""Total time and peak memory of a training, measured as PyTorch's AMP recipe measures them."""

import resource
import time

import torch


class Stopwatch:
    """Timer that starts on creation. The host waits for the device then, and when it is read."""

    def __init__(self, device: torch.device, before: float = 0.0) -> None:
        """before: seconds of earlier attempts."""
        self._device, self._before = device, before
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.synchronize(device)
        self._started = time.perf_counter()

    def metrics(self) -> dict[str, float]:
        """Return seconds over all attempts, and peak bytes: of tensors, or of the process."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux: KiB
        return {
            "run/seconds": self._before + time.perf_counter() - self._started,
            "run/peak_memory_bytes": float(peak),
        }
