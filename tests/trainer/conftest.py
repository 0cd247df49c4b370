"""Small recipes on two kinds of data, and a training loop that collects its events."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.recipe import Loss, Recipe
from halfstep.run_config import parse_config
from halfstep.telemetry.spool import STEP_DTYPE
from tests.spool_made import fields_of
from trainer.data.sampler import Sampler
from trainer.distributed.ranks import Control
from trainer.loop import train
from trainer.recipes.digits import Digits
from trainer.setup import prepare_run
from trainer.step import make_scaler

CPU = torch.device("cpu")


class Regression(Recipe):
    """A small MLP on fixed random data; in fp32 by default, so that numbers can be compared."""

    name: ClassVar = "regression"
    title: ClassVar = "Regression"
    description: ClassVar = "For tests."
    defaults: ClassVar = {
        "precision": "fp32",
        "training": {"steps": 5, "batch_size": 8, "max_grad_norm": None},
    }

    def __init__(self, config, device):
        self.device, self.train_size = device, 64
        self.inputs = torch.randn(64, 6).to(device)
        self.targets = self.inputs.sum(dim=1, keepdim=True)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        self.modules = {"model": model}
        self.optimizers = {
            "sgd": torch.optim.SGD(
                model.parameters(), lr=config.recipe.learning_rate, fused=config.training.fused
            )
        }

    def batch(self, indices, generator):
        rows = indices.to(self.device, non_blocking=True)
        return self.inputs[rows], self.targets[rows]

    def training_step(self, batch):
        inputs, targets = batch
        yield Loss(F.mse_loss(self.modules["model"](inputs), targets), "sgd")


class Pair(Regression):
    """Two networks with an optimizer each; the second network overflows with its loss."""

    name: ClassVar = "pair"
    defaults: ClassVar = {
        "training": {"steps": 40, "batch_size": 8},
        "scaler": {"init_scale": 2.0**16, "growth_interval": 5},
    }

    def __init__(self, config, device):
        super().__init__(config, device)
        second = nn.Linear(1, 1).to(device)
        self.modules["second"] = second
        self.optimizers["adam"] = torch.optim.Adam(
            second.parameters(), lr=1e-3, fused=config.training.fused
        )

    def training_step(self, batch):
        inputs, targets = batch
        output = self.modules["model"](inputs)
        yield Loss(F.mse_loss(output, targets), "sgd")
        # The output is reused: only the second network learns from this loss.
        second = self.modules["second"](output.detach())
        yield Loss(F.mse_loss(second * 16, targets), "adam")


@dataclass
class Run:
    """Events of a training, and its last step."""

    outcome: object = None
    recipe: Recipe | None = None
    records: np.ndarray = field(default_factory=lambda: np.zeros(0, STEP_DTYPE))
    events: list = field(default_factory=list)

    def of(self, event, **fields):
        """Return events of a kind with these fields."""
        return [
            e
            for e in self.events
            if e["event"] == event and all(e[key] == value for key, value in fields.items())
        ]

    def list_skipped(self):
        """Return the numbers of the skipped steps."""
        return self.records["step"][(self.records["flags"] & 1) == 1].tolist()

    def weights(self):
        """Return every weight by name."""
        return {
            f"{name}.{key}": value
            for name, module in self.recipe.modules.items()
            for key, value in module.state_dict().items()
        }


@pytest.fixture
def run_loop(tmp_path):
    """Return a function that trains a recipe, by default on the CPU, and returns a Run."""

    def run(
        recipe_class=Digits,
        values=None,
        folder: Path | None = None,
        device=CPU,
        control=Control,
        **kwargs,
    ):
        run = Run()

        class Kept(recipe_class):
            def __init__(self, config, device):
                super().__init__(config, device)
                self.config = config
                run.recipe = self

        def on_steps(records):
            run.records = np.concatenate([run.records, records])

        run.outcome = train(
            prepare_run(
                Kept,
                parse_config(recipe_class, values or {}),
                device=device,
                on_steps=on_steps,
                on_event=lambda event: run.events.append(fields_of(event)),
                checkpoint_folder=folder,
                artifact_folder=folder and folder.parent / "artifacts",
                **kwargs,
            ),
            control=control,
        )
        return run

    return run


def drawn(sampler):
    """Yield the arguments of recipe.batch for each micro-batch of the next step."""
    for start in sampler.starts():
        yield sampler.indices(start), sampler.generator(start)


def bare_loop(recipe_class, values, device=CPU):
    """PyTorch's documented fp16 loop, unchanged, for a recipe with one optimizer."""
    config = parse_config(recipe_class, values)
    torch.manual_seed(0)
    recipe = recipe_class(config, device)
    torch.manual_seed(0)
    recipe.scaler = scaler = make_scaler(config, device)
    sampler = Sampler(recipe.train_size, config.training)
    [optimizer] = recipe.optimizers.values()
    parameters = [p for module in recipe.modules.values() for p in module.parameters()]
    for _ in range(config.training.steps):
        [batch] = [recipe.batch(*each) for each in drawn(sampler)]
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16):
            [loss] = recipe.training_step(batch)
        scaler.scale(loss.value).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, config.training.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
    return Run(recipe=recipe)


def assert_same_bits(left, right):
    """Assert that two trees of tensors and values are equal to the last bit."""
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        bits = [each.reshape(-1).view(torch.uint8) for each in (left, right)]
        assert torch.equal(*bits)  # so that NaN equals NaN
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same_bits(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same_bits(one, other)
    else:
        assert left == right
