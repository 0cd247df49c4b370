"""Utilization samples of a run's devices and host; unavailable values are None.

CUDA numbers the visible devices from 0. CUDA_VISIBLE_DEVICES may restrict them to numbers, UUIDs
or MIG instances: device i is the i-th of those.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import psutil
from msgspec import UNSET

from halfstep.clock import clock
from halfstep.telemetry.events import Sample

try:
    import pynvml
except ImportError:  # nvidia-ml-py is optional: without it only the host is sampled
    pynvml = None

HOST = -1  # the device number of the machine itself
MASK = "CUDA_VISIBLE_DEVICES"


class SystemMonitor:
    """Sampler of the host and, if NVIDIA's library is present, of the run's GPUs."""

    def __init__(self, devices: Sequence[int], pid: int | None = None) -> None:
        """Sample nothing yet.

        devices: numbers of CUDA devices; without the library, or if unknown, not sampled.  pid: of
        a script, whose process tree's memory and whose machine's traffic are sampled, too.
        """
        self._pid, self._traffic = pid, Traffic() if pid is not None else None
        self._gpus: dict[int, object] = {}
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
            process_memory_bytes=UNSET if self._pid is None else tree_memory(self._pid),
            disk_bytes_per_second=self._traffic.disk() if self._traffic else UNSET,
            network_bytes_per_second=self._traffic.network() if self._traffic else UNSET,
        )
        gpus = self._gpus.items()
        return [host, *(_gpu_sample(elapsed_ms, device, gpu) for device, gpu in gpus)]


def tree_memory(pid: int) -> int | None:
    """Return the resident memory of a process and its descendants; None if it has ended."""
    total, is_alive = 0, False
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):  # a child that has ended meanwhile
                total += process.memory_info().rss
                is_alive = True
    return total if is_alive else None


class Traffic:
    """Bytes per second of all disks and of all network interfaces but the loopback."""

    def __init__(self) -> None:
        self._disk, self._network = Rate(_disk_bytes), Rate(_network_bytes)

    def disk(self) -> float | None:
        """Return the bytes read and written per second since the last call."""
        return self._disk()

    def network(self) -> float | None:
        """Return the bytes sent and received per second since the last call."""
        return self._network()


class Rate:
    """Growth per second of a counter between two calls; None if it cannot be read."""

    def __init__(self, read: Callable[[], int | None]) -> None:
        self._read, self._last, self._at = read, read(), clock()

    def __call__(self) -> float | None:
        """Return the growth per second since the last call."""
        last, at = self._last, self._at
        self._last, self._at = self._read(), clock()
        if last is None or self._last is None or self._at <= at:
            return None
        return max(self._last - last, 0) / (self._at - at)


def _disk_bytes() -> int | None:
    with suppress(OSError, RuntimeError, NotImplementedError):
        if counters := psutil.disk_io_counters():
            return int(counters.read_bytes + counters.write_bytes)
    return None


def _network_bytes() -> int | None:
    with suppress(OSError):
        counters = psutil.net_io_counters(pernic=True)
        others = [counter for name, counter in counters.items() if not name.startswith("lo")]
        return int(sum(counter.bytes_sent + counter.bytes_recv for counter in others))
    return None


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


def gpu_handle(device: int) -> object:
    """Return NVML's handle of a CUDA device. Raises NVMLError."""
    entry = mask_entry(device)
    if entry.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(entry))
    return pynvml.nvmlDeviceGetHandleByUUID(entry)


def mask_entry(device: int) -> str:
    """Return the entry of CUDA_VISIBLE_DEVICES for a CUDA device."""
    mask = os.environ.get(MASK)
    return str(device) if mask is None else mask.split(",")[device].strip()


def _gpu_sample(elapsed_ms: int, device: int, gpu: object) -> Sample:
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
