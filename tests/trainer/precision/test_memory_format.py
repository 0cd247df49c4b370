import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.recipe import Loss
from tests.trainer.conftest import Regression


class Images(Regression):
    """A recipe with 2D and 3D convolutions, and an optimizer of the given kind."""

    kind = torch.optim.AdamW

    def __init__(self, config, device):
        self.device, self.train_size = device, 64
        self.inputs = torch.randn(64, 3, 6, 6)
        self.targets = self.inputs.mean(dim=(1, 2, 3))[:, None]
        flat = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Unflatten(1, (4, 1)))
        model = nn.Sequential(flat, nn.Conv3d(4, 5, (1, 2, 2)), nn.Flatten(), nn.Linear(45, 1))
        self.modules = {"model": model}
        fused = {"fused": True} if self.kind is not torch.optim.RMSprop else {}
        self.optimizers = {"it": self.kind(model.parameters(), lr=1e-2, **fused)}

    def training_step(self, batch):
        inputs, targets = batch
        yield Loss(F.mse_loss(self.modules["model"](inputs), targets), "it")


LAST = {"training": {"channels_last": True}}


def moments(run):
    """Return optimizer states with the shape of a weight, and the weight."""
    return [
        (parameter, value)
        for parameter, state in run.recipe.optimizers["it"].state.items()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    ]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_weights_and_moments_lie_with_their_channels_last(run_loop, kind):
    """Weights and moments of all optimizers are channels-last, with numbers equal up to
    rounding. A fused step through weights and moments of different formats would be detected.
    """
    recipe = type("Some", (Images,), {"kind": kind})
    run, plain = run_loop(recipe, LAST), run_loop(recipe)
    first, second = run.recipe.modules["model"][0][0], run.recipe.modules["model"][1]
    assert first.weight.is_contiguous(memory_format=torch.channels_last)
    assert second.weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert moments(run)
    assert all(value.stride() == weight.stride() for weight, value in moments(run))
    for name, weight in plain.weights().items():
        torch.testing.assert_close(run.weights()[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("before", "after"), [({}, LAST), (LAST, {})])
def test_a_fork_may_change_the_order(run_loop, tmp_path, before, after):
    """A fork may change the memory format either way, with its parent's results up to rounding.

    Catches moments in their saved layout, which a fused step would assign to other weights.
    """
    run_loop(Images, before, folder=tmp_path)
    longer = {"training": {"steps": 9}}
    path = tmp_path / "step-00000005.pt"
    fork = run_loop(Images, {"training": {**after.get("training", {}), "steps": 9}}, resume=path)
    plain = run_loop(Images, {"training": {**before.get("training", {}), **longer["training"]}})
    assert all(value.stride() == weight.stride() for weight, value in moments(fork))
    for name, weight in plain.weights().items():
        torch.testing.assert_close(fork.weights()[name], weight, rtol=1e-4, atol=1e-5)
