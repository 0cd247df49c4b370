"""How busy a run's devices and its host are. A courtesy: what does not answer is left empty."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import pynvml

from db.tables import HOST
from worker import gpus


class SystemMonitor:
    """Take samples of the host and, where there is NVIDIA's library, of the run's GPUs."""

    def __init__(self, devices: list[int], *, cuda: bool) -> None:
        self._gpus: dict[int, Any] = {}
        for device in devices if cuda else ():
            # Without the library, or of a device that it does not know, nothing is sampled.
            with suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                self._gpus[device] = gpus.handle(device)
        psutil.cpu_percent()  # the first call only sets the mark that the next one measures from

    def take(self) -> list[dict[str, Any]]:
        """Return a row a device: utilization 0 to 1, memory_bytes, power_watts,
        temperature_celsius.
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
    """Ask for each figure by itself: a MIG instance, for one, has memory and no utilization."""
    return {
        "device": device,
        "utilization": _told(lambda: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100),
        "memory_bytes": _told(lambda: pynvml.nvmlDeviceGetMemoryInfo(gpu).used),
        "power_watts": _told(lambda: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
        "temperature_celsius": _told(
            lambda: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)
        ),
    }


def _told(ask: Callable[[], float]) -> float | None:
    try:
        return ask()
    except pynvml.NVMLError:
        return None
