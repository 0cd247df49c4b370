"""A worker's devices, as assigned to trainings."""

import pytest

from worker import gpus


@pytest.mark.parametrize(
    ("mask", "devices", "visible"),
    [
        (None, [0, 2], "0,2"),
        ("2,3", [0, 1], "2,3"),
        ("2,3", [1], "3"),
        ("GPU-ab12, MIG-cd34", [1], "MIG-cd34"),
        ("7", [], ""),
    ],
)
def test_a_training_sees_its_devices_of_those_that_the_worker_sees(
    monkeypatch: pytest.MonkeyPatch, mask: str | None, devices: list[int], visible: str
) -> None:
    """A training's devices are selected from the admin's mask: of 2,3 never card 0."""
    if mask is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    result = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible}
    assert gpus.environment(devices) == result


def test_numbers_mean_the_same_to_every_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probe and trainings number devices by PCI bus, unless the admin sets another order."""
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert gpus.environment() == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert gpus.environment() == {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
