"""Operations that a step dispatches in addition to PyTorch's own: the surplus is bounded."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.recipe import Loss
from halfstep.run_config import parse_config
from tests.trainer.conftest import Regression
from tests.trainer.operations_made import Counter
from trainer.distributed.ranks import Ranks
from trainer.setup import make_context
from trainer.step import make_autocast, make_scaler, train_step

CPU = torch.device("cpu")


class Many(Regression):
    """A given number of parameters: vectors of four, summed."""

    wanted = 10

    def __init__(self, config, device):
        self.device, self.train_size = device, 64
        self.inputs = torch.randn(64, 4)
        self.targets = self.inputs.sum(dim=1, keepdim=True)
        model = nn.ParameterList(nn.Parameter(torch.randn(4)) for _ in range(self.wanted))
        self.modules = {"model": model}
        self.optimizers = {"adamw": torch.optim.AdamW(model.parameters(), fused=True)}

    def training_step(self, batch):
        inputs, targets = batch
        weight = torch.stack(list(self.modules["model"])).sum(dim=0)
        yield Loss(F.mse_loss(inputs @ weight[:, None], targets), "adamw")


def operations(parameters: int, *, measured: bool) -> int:
    """Return how many operations the third step dispatches."""
    recipe_class = type("Some", (Many,), {"wanted": parameters})
    values = {"training": {"max_grad_norm": 1.0}, "scaler": {"init_scale": 1.0}}  # no step skips
    values["diagnosis"] = {"replay_skips": 0}  # while it watches, it keeps the random states
    config = parse_config(recipe_class, {"precision": "fp16", **values})
    recipe = recipe_class(config, CPU)
    scaler = recipe.scaler = make_scaler(config, CPU)
    batch = recipe.inputs[:8], recipe.targets[:8]
    autocast = make_autocast(config, CPU)
    [optimizer] = recipe.optimizers.values()

    def bare():
        optimizer.zero_grad()
        with autocast:
            [loss] = recipe.training_step(batch)
        scaler.scale(loss.value).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(recipe.modules["model"].parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    context, followers = make_context(
        recipe,
        recipe.modules,
        config,
        CPU,
        Ranks(),
        on_steps=lambda steps: None,
        on_event=lambda event: None,
        at=0.0,
    )
    followers.telemetry.ring.is_on_host = False  # as on a GPU, where the host cannot write in place

    def with_telemetry():
        context.observers.before_step(1)
        context.observers.after_step(train_step(context, [batch]))

    step = with_telemetry if measured else bare
    for _ in range(2):
        step()
    with Counter() as counter:
        step()
    return counter.count


@pytest.fixture(scope="module")
def surplus() -> dict[int, int]:
    """Return how many operations more a measured step dispatches, by number of parameters."""
    return {
        n: operations(n, measured=True) - operations(n, measured=False) for n in (10, 100, 1000)
    }


@pytest.mark.slow
def test_the_surplus_does_not_grow_with_the_parameters(surplus):
    """10, 100 or 1,000 of them: the same operations for the row, the flags and the norms."""
    assert surplus[10] == surplus[100] == surplus[1000]


def test_the_surplus_is_small(surplus):
    """A stack and a cat for the row, the scale read twice, the loss summed, a flag cloned, and two
    for the scale's bounds."""
    assert surplus[10] <= 11
