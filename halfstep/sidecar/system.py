"""Utilization samples of a run's devices and host; unavailable values are None.

CUDA numbers the visible devices from 0. CUDA_VISIBLE_DEVICES may restrict them to numbers, UUIDs
or MIG instances: device i is the i-th of those.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import psutil

from halfstep.telemetry.events import Sample

try:
    import pynvml
except ImportError:  # nvidia-ml-py is optional: without it only the host is sampled
    pynvml = None

HOST = -1  # the device number of the machine itself
MASK = "CUDA_VISIBLE_DEVICES"
SAMPLE_SECONDS = 2.0


class SystemMonitor:
    """Sampler of the host and, if NVIDIA's library is present, of the run's GPUs."""

    def __init__(self, devices: Sequence[int]) -> None:
        """devices: numbers of CUDA devices; without the library, or if unknown, not sampled."""
        self._gpus: dict[int, Any] = {}
        if pynvml:
            for device in devices:
                with suppress(pynvml.NVMLError):
                    pynvml.nvmlInit()
                    self._gpus[device] = gpu_handle(device)
        psutil.cpu_percent()  # the first call only sets the start of the next measurement

    def take(self, elapsed_ms: int) -> list[Sample]:
        """Return one sample per device, the host first."""
        host = Sample(
            elapsed_ms=elapsed_ms,
            device=HOST,
            utilization=psutil.cpu_percent() / 100,
            memory_bytes=psutil.virtual_memory().used,
            power_watts=None,
            temperature_celsius=None,
        )
        gpus = self._gpus.items()
        return [host, *(_gpu_sample(elapsed_ms, device, gpu) for device, gpu in gpus)]


def visible_gpus() -> list[int]:
    """Return the numbers of the CUDA devices that this process's children see."""
    if pynvml is None:
        return []
    mask = os.environ.get(MASK)
    if mask is not None:
        return list(range(len([entry for entry in mask.split(",") if entry.strip()])))
    try:
        pynvml.nvmlInit()
        return list(range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return []


def gpu_handle(device: int) -> Any:
    """Return NVML's handle of a CUDA device. Raises NVMLError."""
    entry = mask_entry(device)
    if entry.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(entry))
    return pynvml.nvmlDeviceGetHandleByUUID(entry)


def mask_entry(device: int) -> str:
    """Return the entry of CUDA_VISIBLE_DEVICES for a CUDA device."""
    mask = os.environ.get(MASK)
    return str(device) if mask is None else mask.split(",")[device].strip()


def _gpu_sample(elapsed_ms: int, device: int, gpu: Any) -> Sample:
    """Query each value separately: a MIG instance has memory but no utilization."""
    return Sample(
        elapsed_ms=elapsed_ms,
        device=device,
        utilization=_available(lambda: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100),
        memory_bytes=_available(lambda: int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used)),
        power_watts=_available(lambda: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
        temperature_celsius=_available(
            lambda: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)
        ),
    )


T = TypeVar("T", bound=float)


def _available(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except pynvml.NVMLError:
        return None
