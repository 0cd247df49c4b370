"""A step's update on CUDA tensors without values, which needs no GPU and does not replace one.

Meta tensors (test_no_sync.py) show that no value is read; these show that all tensors stay on one
device. Forward and backward cannot be simulated in a build without CUDA.
"""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.run_config import parse_config
from tests.trainer.conftest import Pair
from trainer.diagnosis.histogram import Histogram
from trainer.distributed.ranks import Ranks
from trainer.observers import Observer
from trainer.optimizers import StepResult
from trainer.precision.scale_policies import ScaleRule
from trainer.prepared_recipe import PreparedRecipe
from trainer.schedule import make_schedule, peak_rates
from trainer.setup import make_context
from trainer.step import update_weights

CUDA = torch.device("cuda", 0)


class Adams(Pair):
    """Two optimizers with a fused kernel that torch can simulate."""

    def __init__(self, config, device):
        super().__init__(config, device)
        self.optimizers = {
            name: torch.optim.AdamW(self.modules[module].parameters(), fused=True)
            for name, module in (("sgd", "model"), ("adam", "second"))
        }


class Leaving(Exception):
    """Raised when a tensor is copied from the device to the host."""


class StayOnDevice(TorchDispatchMode):
    """Raises Leaving at each copy from CUDA to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        leaves = [each for each in args if isinstance(each, torch.Tensor) and each.is_cuda]
        if leaves and isinstance(made, torch.Tensor) and not made.is_cuda:
            raise Leaving(f"{func} from CUDA to {made.device}")
        return made


def fail(event):
    raise RuntimeError(event.error)


def update_on_cuda(monkeypatch, values, spoil=lambda telemetry: None):
    """Run three updates of two optimizers, with made-up gradients."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.nn.Linear, "reset_parameters", lambda self: None)  # needs a generator
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *_args: self)  # made there already
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)
    monkeypatch.setattr(Histogram, "after_step", Observer.after_step)
    # The scale's bounds are a copy between CUDA tensors, which only CUDA's own build can pretend.
    monkeypatch.setattr(ScaleRule, "update", lambda _self, scaler, _: scaler.update())
    config = parse_config(Adams, {"precision": "fp16", **values})
    with FakeTensorMode(allow_non_fake_inputs=True), StayOnDevice():
        with CUDA:
            recipe = Adams(config, CUDA)
        with monkeypatch.context() as patched:  # memory can be pinned only where there is CUDA
            empty = torch.empty
            patched.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
            context, _followers = make_context(
                PreparedRecipe(recipe, recipe.modules, config, CUDA, Ranks()),
                on_steps=None,
                on_event=fail,
                at=0.0,
            )
        scaler, optimizers, observers = context.scaler, context.optimizers, context.observers
        schedule = make_schedule(
            config.training, recipe.optimizers, peak_rates(recipe.optimizers), CUDA
        )
        for step in range(1, 4):
            schedule.apply(step)
            observers.before_step(step)
            scaler.scale(torch.ones((), device=CUDA))
            scale = context.scale_rule.scale(scaler)
            updates = {}
            for name, watched in optimizers.items():
                for parameter in watched.parameters:
                    parameter.grad = torch.empty_like(parameter)
                updates[name] = update_weights(context, watched)
            found_inf = [update.found_inf for update in updates.values()]
            rate = optimizers["sgd"].rate
            observers.after_step(StepResult(scale, scale, updates, set(updates), rate))
            context.scale_rule.update(scaler, found_inf)
            schedule.count({name: update.found_inf for name, update in updates.items()})
            spoil(updates["sgd"])


VALUES = {
    "training": {"max_grad_norm": 1.0, "max_grad_value": 0.5},
    "diagnosis": {"histogram_every_steps": 1, "replay_skips": 0},
}


@pytest.mark.slow
def test_an_update_reads_nothing_and_stays_on_the_device(monkeypatch):
    """An update from unscale to row reads no value, and all its tensors stay on the CUDA device."""
    update_on_cuda(monkeypatch, VALUES)


@pytest.mark.parametrize(
    "ask", [lambda update: update.found_inf.item(), lambda update: update.norms[0].cpu()]
)
def test_the_guard_sees_the_user(monkeypatch, ask):
    """The proof fails for a value that is read, or a tensor that is copied to the host."""
    with pytest.raises(Exception, match=r"aten._local_scalar_dense|from CUDA to cpu"):
        update_on_cuda(monkeypatch, VALUES, spoil=ask)
