"""Losses and optimizers: one or several of each, with and without accumulation."""

import weakref
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.recipe import Loss, RecipeError
from halfstep.run_config import parse_config
from tests.trainer.conftest import CPU, Pair, Regression, assert_same_bits, drawn
from trainer.data.sampler import Sampler
from trainer.step import make_scaler

FP16 = {"precision": "fp16", "scaler": {"init_scale": 2.0**16, "growth_interval": 5}}


class Counting(Regression):
    """A network that counts live outputs after each forward pass."""

    def __init__(self, config, device):
        super().__init__(config, device)
        self.outputs, self.alive, self.held = [], [], []

    def batch(self, indices, generator):
        inputs, targets = super().batch(indices, generator)
        self.held.append(weakref.ref(inputs))
        return inputs, targets

    def training_step(self, batch):
        inputs, targets = batch
        output = self.modules["model"](inputs)
        self.outputs.append(weakref.ref(output))
        self.alive.append(sum(each() is not None for each in self.outputs))
        yield Loss(F.mse_loss(output, targets), "sgd")


@pytest.mark.parametrize("micro_batches", [1, 4, 16])
def test_accumulation_holds_one_micro_batch_at_a_time(run_loop, micro_batches):
    """With accumulation one micro-batch's activations exist at a time, and at most two inputs."""
    values = {"training": {"batch_size": 4, "accumulation_steps": micro_batches, "steps": 2}}
    run = run_loop(Counting, values)
    assert run.recipe.alive == [1] * (2 * micro_batches)
    assert sum(each() is not None for each in run.recipe.held) <= 2


class Shared(Regression):
    """PyTorch's example of several losses, each with both networks' outputs."""

    name: ClassVar = "shared"
    defaults: ClassVar = {"training": {"steps": 30, "batch_size": 8, "max_grad_norm": None}}

    def __init__(self, config, device):
        super().__init__(config, device)
        other = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        self.modules["other"] = other
        fused = config.training.fused
        self.optimizers["adam"] = torch.optim.Adam(other.parameters(), lr=1e-3, fused=fused)

    def losses(self, batch):
        inputs, targets = batch
        one, other = self.modules["model"](inputs), self.modules["other"](inputs)
        return (
            F.mse_loss(2 * one + 3 * other, targets),
            F.mse_loss(3 * one - 5 * other, targets),
        )

    def training_step(self, batch):
        first, second = self.losses(batch)
        both = ("sgd", "adam")
        yield Loss(first, both), Loss(second, both)


@pytest.mark.slow
def test_several_losses_of_a_shared_graph_as_pytorch_does_it(run_loop):
    """Several losses train bit-equal to the "multiple losses" example in PyTorch's AMP docs."""
    run = run_loop(Shared, FP16)
    config = parse_config(Shared, FP16)
    torch.manual_seed(0)
    recipe = Shared(config, CPU)
    scaler, sampler = make_scaler(config, CPU), Sampler(64, config.training)
    for _ in range(30):
        [batch] = [recipe.batch(*each) for each in drawn(sampler)]
        for optimizer in recipe.optimizers.values():
            optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            first, second = recipe.losses(batch)
        scaler.scale(first).backward(retain_graph=True)
        scaler.scale(second).backward()
        for optimizer in recipe.optimizers.values():
            scaler.step(optimizer)
        scaler.update()
    plain = {name: module.state_dict() for name, module in recipe.modules.items()}
    for name, module in run.recipe.modules.items():
        assert_same_bits(module.state_dict(), plain[name])
    assert run.records["flags"].any()  # some were skipped


class Adversaries(Shared):
    """Two losses, each of its own network's outputs, in a shared graph."""

    name: ClassVar = "adversaries"

    def training_step(self, batch):
        first, second = self.losses(batch)
        yield Loss(first, "sgd"), Loss(second, "adam")


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_losses_yielded_together_reach_their_own_optimizers(run_loop, accumulation_steps):
    """Losses yielded together train their own networks, before either has stepped."""
    training = {"steps": 1, "batch_size": 8, "accumulation_steps": accumulation_steps}
    run = run_loop(Adversaries, {"precision": "fp32", "training": training})
    config = parse_config(Adversaries, {"training": training})
    torch.manual_seed(0)
    recipe, sampler = Adversaries(config, CPU), Sampler(64, config.training)
    batches = [recipe.batch(*each) for each in drawn(sampler)]
    losses = [recipe.losses(batch) for batch in batches]
    for module, number, optimizer in (("model", 0, "sgd"), ("other", 1, "adam")):
        network = recipe.modules[module]
        loss = sum(each[number] / accumulation_steps for each in losses)
        gradients = torch.autograd.grad(loss, list(network.parameters()), retain_graph=True)
        for parameter, gradient in zip(network.parameters(), gradients, strict=True):
            parameter.grad = gradient
        recipe.optimizers[optimizer].step()
        for name, weight in run.recipe.modules[module].state_dict().items():
            torch.testing.assert_close(weight, network.state_dict()[name], rtol=1e-6, atol=1e-7)


class Split(Regression):
    """A recipe with one loss, and separate optimizers for matrices and the rest."""

    def __init__(self, config, device):
        super().__init__(config, device)
        model = self.modules["model"]
        matrices = [p for p in model.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if p.dim() < 2]
        self.optimizers = {
            "matrices": torch.optim.SGD(matrices, lr=0.05, fused=True),
            "rest": torch.optim.SGD(rest, lr=0.05, fused=True),
        }

    def training_step(self, batch):
        for loss in super().training_step(batch):
            yield Loss(loss.value, ("matrices", "rest"))


def test_one_loss_can_feed_several_optimizers(run_loop):
    """Two optimizers of the same kind and rate equal a single one."""
    values = {"precision": "fp16", "training": {"steps": 30}}

    class Whole(Regression):
        def __init__(self, config, device):
            super().__init__(config, device)
            parameters = self.modules["model"].parameters()
            self.optimizers = {"sgd": torch.optim.SGD(parameters, lr=0.05, fused=True)}

    split, whole = run_loop(Split, values), run_loop(Whole, values)
    assert_same_bits(split.weights(), whole.weights())
    assert split.records["loss"].tolist() == whole.records["loss"].tolist()


@pytest.mark.parametrize("recipe", [Regression, Pair])
def test_two_losses_for_one_optimizer_are_rejected_with_accumulation_too(run_loop, recipe):
    """A second loss for one optimizer in the last micro-batch is rejected."""

    class Twice(recipe):
        def training_step(self, batch):
            yield from super().training_step(batch)
            yield from super().training_step(batch)

    with pytest.raises(RecipeError, match='two losses for optimizer "sgd": add them'):
        run_loop(Twice, {"training": {"accumulation_steps": 2}})


class Averaging(Regression):
    """A recipe that counts, and keeps a moving average of its weights as a module."""

    def __init__(self, config, device):
        super().__init__(config, device)
        self.modules["average"] = torch.optim.swa_utils.AveragedModel(self.modules["model"])
        self.steps, self.micro_batches = 0, 0

    def training_step(self, batch):
        self.micro_batches += 1
        yield from super().training_step(batch)

    def after_step(self):
        self.steps += 1
        self.modules["average"].update_parameters(self.modules["model"])

    def state_dict(self):
        return {"steps": self.steps, "seen": {"micro_batches": self.micro_batches}}

    def load_state_dict(self, state):
        self.steps, self.micro_batches = state["steps"], state["seen"]["micro_batches"]


def test_after_step_comes_once_a_step(run_loop):
    """after_step is called once per step, after the update, for any number of micro-batches."""
    run = run_loop(Averaging, {"training": {"accumulation_steps": 4, "steps": 6}})
    assert (run.recipe.steps, run.recipe.micro_batches) == (6, 24)
    average = run.recipe.modules["average"]
    assert int(average.n_averaged) == 6


def test_a_recipes_own_state_is_resumed(run_loop, tmp_path):
    """A resumed recipe gets its state_dict from the checkpoint."""
    values = {"training": {"steps": 4}, "checkpoints": {"every_steps": 2}}
    whole = run_loop(Averaging, values, tmp_path / "checkpoints")
    half = tmp_path / "checkpoints" / "step-00000002.pt"
    resumed = run_loop(Averaging, values, tmp_path / "again", resume=half)
    assert (resumed.recipe.steps, resumed.recipe.micro_batches) == (4, 4)
    assert_same_bits(resumed.weights(), whole.weights())


def test_a_state_that_a_checkpoint_cannot_hold_is_named(run_loop, tmp_path):
    """An object that needs code to be loaded is refused when saved, with its path."""

    class Holding(Regression):
        def state_dict(self):
            return {"data": {"iterator": iter([])}}

    message = r"Recipe.state_dict\(\)\['data'\]\['iterator'\] is a list_iterator"
    with pytest.raises(RecipeError, match=message):
        run_loop(Holding, {}, tmp_path / "checkpoints")


def test_generators_of_a_step_are_released(run_loop):
    """A step's graph is released before the next forward pass."""
    run = run_loop(Counting, {"training": {"steps": 5, "accumulation_steps": 1}})
    assert run.recipe.alive == [1] * 5
