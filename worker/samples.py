"""How busy the devices of a run and its host are."""

from contextlib import suppress
from typing import Any

import psutil
import pynvml

#: The host itself among the devices of a sample.
HOST = -1


class SystemMonitor:
    """Take samples of the host and, where there is NVIDIA's library, of the run's GPUs."""

    def __init__(self, devices: list[int], *, cuda: bool) -> None:
        self._gpus: dict[int, Any] = {}
        if cuda:
            pynvml.nvmlInit()
            self._gpus = {index: pynvml.nvmlDeviceGetHandleByIndex(index) for index in devices}
        psutil.cpu_percent()  # the first call only sets the mark that the next one measures from

    def take(self) -> list[dict[str, Any]]:
        """Return a row a device: utilization 0 to 1, memory_bytes, power_watts."""
        host = {
            "device": HOST,
            "utilization": psutil.cpu_percent() / 100,
            "memory_bytes": psutil.virtual_memory().used,
            "power_watts": None,
        }
        return [host, *(_gpu_sample(index, gpu) for index, gpu in self._gpus.items())]


def _gpu_sample(index: int, gpu: Any) -> dict[str, Any]:
    """Return what a GPU tells; nothing of one that does not answer, which is no run's fault."""
    sample = dict.fromkeys(("utilization", "memory_bytes", "power_watts"))
    with suppress(pynvml.NVMLError):
        sample = {
            "utilization": pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
            "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(gpu).used,
            "power_watts": pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
        }
    return {"device": index, **sample}
