"""Samples of the machine, also if devices fail."""

import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pynvml
import pytest
from msgspec import UNSET

from halfstep.clock import clock
from halfstep.sidecar import system
from halfstep.sidecar.system import Rate, SystemMonitor, tree_memory
from halfstep.telemetry.events import Sample

EMPTY = dict.fromkeys(("utilization", "memory_bytes", "power_watts", "temperature_celsius"))


def fail(code: int) -> object:
    def failing(*_arguments: object) -> None:
        raise pynvml.NVMLError(code)

    return failing


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A stand-in for NVML with handles equal to their arguments."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, answer in {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: ("index", index),
        "nvmlDeviceGetHandleByUUID": lambda uuid: ("uuid", uuid),
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=50),
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=7),
        "nvmlDeviceGetPowerUsage": lambda gpu: 9000,
        "nvmlDeviceGetTemperature": lambda gpu, sensor: 61,
    }.items():
        monkeypatch.setattr(pynvml, name, answer)
    return monkeypatch


def test_a_gpu_that_does_not_answer_has_an_empty_sample(nvml: pytest.MonkeyPatch) -> None:
    """If a GPU does not answer, steps and samples of the host are still recorded."""
    for question in ("UtilizationRates", "MemoryInfo", "PowerUsage", "Temperature"):
        nvml.setattr(pynvml, f"nvmlDeviceGet{question}", fail(pynvml.NVML_ERROR_GPU_IS_LOST))
    host, gpu = SystemMonitor([3]).take(2000)
    assert host.memory_bytes > 0
    assert gpu == Sample(elapsed_ms=2000, device=3, **EMPTY)


def test_a_figure_that_is_not_supported_hides_no_other(nvml: pytest.MonkeyPatch) -> None:
    """An unsupported figure hides no other: a MIG instance reports memory without utilization."""
    unsupported = fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
    nvml.setattr(pynvml, "nvmlDeviceGetUtilizationRates", unsupported)
    _host, gpu = SystemMonitor([0]).take(2000)
    result = {"memory_bytes": 7, "power_watts": 9.0, "temperature_celsius": 61}
    assert gpu == Sample(elapsed_ms=2000, device=0, utilization=None, **result)


@pytest.mark.parametrize("question", ["nvmlInit", "nvmlDeviceGetHandleByIndex"])
def test_without_nvidias_library_the_host_is_sampled(
    nvml: pytest.MonkeyPatch, question: str
) -> None:
    """Without NVIDIA's library, or with functions missing in it, the host is still sampled."""
    nvml.setattr(pynvml, question, fail(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    assert len(SystemMonitor([0]).take(2000)) == 1


def test_the_polled_cards_are_those_of_the_run(nvml: pytest.MonkeyPatch) -> None:
    """Device i is the i-th in CUDA_VISIBLE_DEVICES, by number or by UUID."""
    nvml.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-ab12,MIG-cd34")
    monitor = SystemMonitor([0, 1, 2])
    handles = [("index", 5), ("uuid", "GPU-ab12"), ("uuid", "MIG-cd34")]
    assert list(monitor._gpus.values()) == handles


def test_a_scripts_memory_is_that_of_its_process_tree() -> None:
    """A script's memory includes its children's, and an ended process has none."""
    code = "import time; block = bytearray(64 << 20); print(1, flush=True); time.sleep(600)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    with subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        memory = tree_memory(process.pid)
        children = psutil.Process(process.pid).children(recursive=True)
        for child in (*children, process):
            child.kill()
    assert memory is not None
    assert memory > 64 << 20
    assert tree_memory(process.pid) is None


def test_traffic_is_what_a_counter_grew_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traffic per second is a counter's growth; a reset counter gives no negative rate, and a
    missing one None.
    """
    moment, counts = 0.0, iter([100, 300, 10, None, 20])
    monkeypatch.setattr(system, "clock", lambda: moment)
    rate = Rate(lambda: next(counts))
    rates = []
    for second in (2.0, 3.0, 4.0, 5.0):
        moment = second
        rates.append(rate())
    assert rates == [100.0, 0.0, None, None]


def test_a_script_has_more_in_the_hosts_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's sample also has its memory and the traffic of disks and network."""
    monitor = SystemMonitor([], os.getpid())
    moment = clock()
    while clock() == moment:
        pass
    [host] = monitor.take(2000)
    assert host.process_memory_bytes > 1 << 20  # type: ignore[operator]
    assert host.network_bytes_per_second is None or host.network_bytes_per_second >= 0  # type: ignore[operator]
    [host] = SystemMonitor([]).take(2000)
    assert host.process_memory_bytes is UNSET
