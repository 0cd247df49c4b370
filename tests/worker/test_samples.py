"""What the machine is asked, and what becomes of an answer that does not come."""

import pynvml
import pytest

from worker.samples import SystemMonitor


def test_a_gpu_that_does_not_answer_has_an_empty_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps nobody's steps from being recorded; the host's own figures are there."""

    def lost(_gpu: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lost)
    host, gpu = SystemMonitor([3], cuda=True).take()
    assert host["memory_bytes"] > 0
    assert gpu == {"device": 3, "utilization": None, "memory_bytes": None, "power_watts": None}
