"""The step never waits for the device: proven without one.

The loop's own step function runs with default settings, replays included, on PyTorch's `meta`
device, whose tensors have shapes and no values; copies to the host never arrive. Whatever would
make the host wait for a real device has to read a value, and so raises here: `.item()`,
`bool(tensor)`, `.cpu()`, `nonzero()`. Each is shown to be caught. (FakeTensorMode with
device="cuda" proves less: a CPU build has no backward there, and it lets `.cpu()` pass.)
"""

import pytest
import torch

from halfstep.recipe import Loss
from tests.marks import extended
from tests.trainer.conftest import Pair, Regression
from tests.trainer.no_sync_made import META, attempt_steps
from trainer.diagnosis.histogram import Histogram
from trainer.optimizers import WatchedOptimizer
from trainer.precision.scale_policies import ScaleRule
from trainer.recipes.digits import Digits
from trainer.recipes.erfnet import ERFNet
from trainer.recipes.gpt import GPT
from trainer.recipes.wgan_gp import WGANGP
from trainer.schedule import AppliedSchedule
from trainer.telemetry import Telemetry


@pytest.mark.parametrize("precision", ["fp16", *extended(["bf16", "fp32"])])
@pytest.mark.parametrize(
    "recipe_class", [Regression, Pair, Digits, GPT, WGANGP, *extended([ERFNet])]
)
def test_a_step_never_waits_for_the_device(monkeypatch, recipe_class, precision):
    """A step with fused optimizers, clip, accumulation and telemetry never waits for the device."""
    values = {
        "precision": precision,
        "training": {"max_grad_norm": 1.0, "accumulation_steps": 2},
        "diagnosis": {"histogram_every_steps": 1, "headroom_every_steps": 1},
    }
    recipe = attempt_steps(monkeypatch, recipe_class, values)
    assert recipe.scaler.is_enabled() == (precision == "fp16")
    assert all(next(network.parameters()).is_meta for network in recipe.modules.values())


def test_the_policies_never_wait_for_the_device(monkeypatch):
    """Floor, ceiling, hysteresis, tolerance, clip by value and applied-step rates stay on the
    device.
    """
    values = {
        "training": {"schedule_counts": "applied", "schedule": "cosine", "max_grad_value": 0.1},
        "scaler": {"floor": 1.0, "ceiling": 2.0**20, "hysteresis": 2, "tolerance": 0.1},
    }
    attempt_steps(monkeypatch, Pair, values)


def test_an_unfused_optimizer_waits_once_a_step(monkeypatch):
    """An unfused optimizer waits once in each step, because torch's scaler reads a flag."""
    with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta tensors"):
        attempt_steps(monkeypatch, Pair, {"training": {"fused": False}})


@pytest.mark.parametrize(
    "ask",
    [
        lambda tensor: tensor.item(),
        lambda tensor: float(tensor),
        lambda tensor: bool(tensor > 0),
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor.to("cpu", non_blocking=True),
        lambda tensor: torch.zeros(()).copy_(tensor),
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor.numpy(force=True),
        lambda tensor: tensor.nonzero(),
        lambda tensor: torch.equal(tensor, tensor),
    ],
    ids=["item", "float", "bool", "cpu", "to", "copy_", "tolist", "numpy", "nonzero", "equal"],
)
def test_the_guard_sees_a_recipe_that_waits(monkeypatch, ask):
    """The guard detects every way of reading a loss on the host."""

    class Asking(Regression):
        def training_step(self, batch):
            for loss in super().training_step(batch):
                ask(loss.value.detach())
                yield Loss(loss.value, loss.optimizer)

    with pytest.raises((RuntimeError, NotImplementedError), match=r"[Mm]eta"):
        attempt_steps(monkeypatch, Asking)


@pytest.mark.parametrize(
    ("owner", "place"),
    [
        (Telemetry, "after_step"),
        (WatchedOptimizer, "gradient_norms"),
        (Histogram, "before_clip"),
        (ScaleRule, "update"),
        (AppliedSchedule, "apply"),
        (AppliedSchedule, "count"),
    ],
)
@pytest.mark.parametrize("ask", ["item", *extended(["cpu", "tolist"])])
def test_the_guard_sees_a_wait_inside_the_loop(monkeypatch, owner, place, ask):
    """The guard detects a value that the loop reads where it measures, decides or writes."""
    original = getattr(owner, place)

    def asking(self, *args):
        result = original(self, *args)
        getattr(torch.ones((), device=META), ask)()
        return result

    monkeypatch.setattr(owner, place, asking)
    values = {"training": {"schedule_counts": "applied"}}
    with pytest.raises((RuntimeError, NotImplementedError), match=r"[Mm]eta"):
        attempt_steps(monkeypatch, Pair, values)


def test_the_guard_sees_get_scale(monkeypatch):
    """The guard detects a scale that is read on the host."""
    with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta tensors"):
        attempt_steps(monkeypatch, Pair, after_step=lambda recipe: recipe.scaler.get_scale())
