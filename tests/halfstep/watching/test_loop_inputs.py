"""The inputs of a loop on a device, as its variables hold them."""

import pytest
import torch

from halfstep.evidence.loop_inputs import MOST_ON_DEVICE, counts_of, device_inputs

CPU = torch.device("cpu")


def test_all_inputs_on_the_device_are_found() -> None:
    """All inputs on the device are found by name, also in containers; results are not."""
    batch = {"x": torch.ones(2), "y": torch.ones(2, dtype=torch.int64)}
    result = torch.ones(2, requires_grad=True) * 2
    inputs, are_all = device_inputs(CPU)
    assert result.grad_fn is not None
    assert are_all
    assert [name for name in inputs if name.startswith("batch")] == ["batch['x']"]
    assert inputs["batch['x']"] is batch["x"]
    assert "result" not in inputs


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_inputs_that_are_not_counted_are_not_all() -> None:
    """Inputs on another device, of an unsupported type, nested or too many are reported as left
    out.
    """
    for other in (
        torch.ones(2, device="meta"),
        torch.ones(2).to(torch.float8_e4m3fn),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        [torch.ones(2) for _ in range(MOST_ON_DEVICE + 1)],
    ):
        inputs, are_all = device_inputs(CPU)
        assert not are_all, other
        assert len(inputs) <= MOST_ON_DEVICE
        for tensor in inputs.values():
            counts_of(tensor)


def test_without_an_input_nothing_is_examined() -> None:
    """Without an input in the script's variables, as in a trainer, nothing is examined."""
    labels = torch.ones(2, dtype=torch.int64)
    assert device_inputs(CPU) == ({}, False)
    del labels
