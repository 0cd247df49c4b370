"""Shared helpers of the tests of no sync."""

import sys

import torch

from halfstep.run_config import parse_config
from halfstep.watching.async_host_copy import HostCopy
from tests.trainer.conftest import CPU
from trainer import setup
from trainer.distributed.ranks import Ranks
from trainer.prepared_recipe import PreparedRecipe
from trainer.schedule import make_schedule, peak_rates
from trainer.setup import make_context
from trainer.step import make_scaler, train_step

META, CUDA = torch.device("meta"), torch.device("cuda")
# torch lacks meta kernels of these; they change tensors in place only.
meta_kernels = torch.library.Library("aten", "IMPL", "Meta")
for kernel in ("_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adam_.tensor_lr"):
    meta_kernels.impl(kernel, lambda *args, **kwargs: None)


def fail(event):
    """Raise the exception that a diagnosis would otherwise ignore."""
    raise RuntimeError(event.error)


def attempt_steps(monkeypatch, recipe_class, values=None, after_step=lambda recipe: None):
    """Run three steps of the real step function on tensors without values."""
    supported = torch.utils._foreach_utils._get_fused_kernels_supported_devices()
    monkeypatch.setattr(
        sys.modules["torch.optim.optimizer"],  # torch.optim hides it behind a name
        "_get_fused_kernels_supported_devices",
        lambda: [*supported, "meta"],
    )
    # A recipe may open regions of its own for its device, and autocast knows no meta device.
    open_region = torch.autocast.__init__
    monkeypatch.setattr(
        torch.autocast,
        "__init__",
        lambda self, device, *args, **kwargs: open_region(
            self, "cpu" if device == "meta" else device, *args, **kwargs
        ),
    )
    # Its tensors go where the losses are: to meta.
    monkeypatch.setattr(setup, "make_scaler", lambda config, _device: make_scaler(config, CPU))
    # What is on its way to the host arrives by an event, which only CUDA has: here, never.
    monkeypatch.setattr(HostCopy, "has_arrived", lambda self: False)
    values = {"data": {"workers": 0}, **(values or {})}
    config = parse_config(recipe_class, values)
    recipe = recipe_class(config, META)
    context, _followers = make_context(
        PreparedRecipe(recipe, recipe.modules, config, META, Ranks()),
        on_steps=None,
        on_event=fail,
        at=0.0,
    )
    recipe.scaler._device = "meta"  # update(new_scale) compares it with the tensor's
    schedule = make_schedule(
        config.training, recipe.optimizers, peak_rates(recipe.optimizers), META
    )
    for number in range(1, 4):
        schedule.apply(number)
        context.observers.before_step(number)
        result = train_step(context, context.batches.step())
        schedule.count({name: result.updates[name].found_inf for name in result.stepped})
        after_step(recipe)
    return recipe
