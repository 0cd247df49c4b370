import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.recipe import Loss
from tests.trainer.conftest import Regression, assert_same_bits


class Attentive(Regression):
    """A recipe with MultiheadAttention, which uses out_proj's weights without calling it."""

    def __init__(self, config, device):
        super().__init__(config, device)
        model = nn.Module()
        model.attention, model.head = nn.MultiheadAttention(6, 1), nn.Linear(6, 1)
        self.modules = {"model": model}
        self.optimizers = {"sgd": torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)}

    def training_step(self, batch):
        inputs, targets = batch
        model = self.modules["model"]
        attended, _weights = model.attention(inputs, inputs, inputs)
        yield Loss(F.mse_loss(model.head(attended).float(), targets), "sgd")


@pytest.mark.parametrize("field", ["fp32", "bf16", "checkpointed"])
def test_patterns_that_match_no_called_module_are_reported(run_loop, field):
    """A pattern that matches only uncalled modules is reported once after the first step."""
    names = ["model.attention.out_proj", "model.head"]
    run = run_loop(Attentive, {"precision": "fp16", "modules": {field: names}})
    [event] = run.of("uncalled")
    assert (event["step"], event["modules"]) == (1, ["model.attention.out_proj"])


def test_called_modules_are_not_reported_and_lose_their_hooks(run_loop):
    """Hooks of called modules are removed, and no bit changes."""
    run = run_loop(Attentive, {"modules": {"fp32": ["model.attention", "model.head"]}})
    assert not run.of("uncalled")
    model = run.recipe.modules["model"]
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert_same_bits(run.weights(), run_loop(Attentive).weights())
