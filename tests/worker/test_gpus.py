"""A worker's devices, as assigned to a training."""

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
    """The administrator's mask is applied, never widened: 2,3 leads to no card 0."""
    if mask is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    result = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible}
    assert gpus.environment(devices) == result


def test_numbers_mean_the_same_to_every_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe counts as the training will, and as the administrator says, if he does."""
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert gpus.environment() == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert gpus.environment() == {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
