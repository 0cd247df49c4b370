"""Utilization samples of a run's devices and host; unavailable values are None."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import pynvml

from db.tables import HOST
from worker import gpus


class SystemMonitor:
    """Sampler of the host and, if NVIDIA's library is present, of the run's GPUs."""

    def __init__(self, devices: list[int], *, cuda: bool) -> None:
        self._gpus: dict[int, Any] = {}
        for device in devices if cuda else ():
            # Without the library, or for a device unknown to it, nothing is sampled.
            with suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                self._gpus[device] = gpus.handle(device)
        psutil.cpu_percent()  # the first call only sets the start of the next measurement

    def take(self) -> list[dict[str, Any]]:
        """Return one row per device, the host first.

        Columns: utilization (0 to 1), memory_bytes, power_watts, temperature_celsius.
        """
        host = {
            "device": HOST,
            "utilization": psutil.cpu_percent() / 100,
            "memory_bytes": psutil.virtual_memory().used,
            "power_watts": None,
            "temperature_celsius": None,
        }
        return [host, *(_gpu_sample(device, gpu) for device, gpu in self._gpus.items())]


def _gpu_sample(device: int, gpu: Any) -> dict[str, Any]:
    """Query each value separately: a MIG instance has memory but no utilization."""
    return {
        "device": device,
        "utilization": _available(lambda: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100),
        "memory_bytes": _available(lambda: pynvml.nvmlDeviceGetMemoryInfo(gpu).used),
        "power_watts": _available(lambda: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
        "temperature_celsius": _available(
            lambda: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)
        ),
    }


def _available(ask: Callable[[], float]) -> float | None:
    try:
        return ask()
    except pynvml.NVMLError:
        return None
