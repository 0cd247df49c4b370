"""Precision plans on a real GPU: measured times, and the same results as on a CPU."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from halfstep import precision_plan
from tests.gpu.device import DEVICE, needs_cuda, rng_state
from tests.halfstep.precision_lab.models_made import Transformer, next_token, squared_error
from tests.halfstep.precision_lab.plans_made import PLANS, STRICT


@needs_cuda
def test_times_are_measured():
    """On a GPU half precision is faster for large layers, and each module's cost is measured."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))).to(DEVICE)
    batch = torch.randn(4096, 4096, device=DEVICE), torch.randn(4096, 4096, device=DEVICE)
    before = copy.deepcopy(model.state_dict())
    plan = precision_plan(model, [batch], squared_error)
    assert plan.cost == "measured"
    assert plan.fp32_cost is None
    assert plan.device == torch.cuda.get_device_name()
    assert str(plan.best) == "fp16 everywhere"
    assert plan.best.ms is not None
    assert plan.best.time < 1
    assert all(row.ms is not None for row in plan.modules)
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["cancellation", "loss in fp16", "overflow of a layer"])
def test_planted_need_is_named(name):
    """The module that needs more precision is named as on a CPU.

    CUDA's autocast computes the loss in fp32.
    """
    torch.manual_seed(0)
    case = PLANS[name]
    batch = tuple(tensor.to(DEVICE) for tensor in case.batch())
    plan = precision_plan(case.make().to(DEVICE), [batch], case.loss, **STRICT)
    is_fp32 = name == "loss in fp16" and DEVICE.type == "cuda"
    assert set(plan.of_precision["fp16"].named) == (set() if is_fp32 else case.fp16)


def test_generators_stay():
    """Dropout in a plan does not change the device's random generator."""
    model = Transformer().to(DEVICE)
    tokens = torch.randint(0, 17, (4, 13), device=DEVICE)

    def loss(model, batch):
        with torch.device(DEVICE):
            return next_token(model, batch)

    states = torch.get_rng_state(), rng_state()
    precision_plan(model, [tokens], loss)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(rng_state(), states[1])


@pytest.mark.parametrize("is_torn", [False, True])
def test_drawing_the_batches_leaves_the_generators(is_torn):
    """Drawing batches on the device leaves its generator as it was, also after an error."""

    def drawn():
        yield tuple(torch.randn(8, 16, device=DEVICE) for _ in range(2))
        if is_torn:
            raise OSError("the file is gone")

    model, state = nn.Linear(16, 16).to(DEVICE), rng_state()
    with pytest.raises(OSError, match="the file is gone") if is_torn else nullcontext():
        precision_plan(model, drawn(), squared_error)
    assert torch.equal(rng_state(), state)
