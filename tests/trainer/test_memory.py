"""Memory computed on the meta device equals real tensors' memory."""

import json
from typing import Any

import pytest
import torch
from msgspec import to_builtins
from torch import Tensor, nn

from halfstep.recipe import Recipe
from halfstep.run_config import RunConfig, parse_config
from trainer import memory
from trainer.recipes.wgan_gp import WGANGP


class Tied(Recipe):
    """A recipe with a tied embedding, a convolution, a frozen layer and a buffer."""

    name = "tied"
    title = description = "Tied"

    def __init__(self, config: RunConfig[Any], device: torch.device) -> None:
        network = nn.Module()
        network.words = nn.Embedding(10, 4)
        network.head = nn.Linear(4, 10, bias=False)
        network.head.weight = network.words.weight
        network.convolution = nn.Conv2d(1, 2, 3)
        network.frozen = nn.Linear(2, 2, bias=False).requires_grad_(False)
        network.register_buffer("mean", torch.zeros(5, dtype=torch.float64))
        self.modules = {"network": network.to(device)}
        trained = [p for p in network.parameters() if p.requires_grad]
        self.optimizers = {"adamw": torch.optim.AdamW(trained, fused=config.training.fused)}

    def training_step(self, batch: Any) -> Any:
        yield


class Reading(Tied):
    """A recipe that reads a value, which the meta device lacks."""

    def __init__(self, config: RunConfig[Any], device: torch.device) -> None:
        super().__init__(config, device)
        self.first = torch.ones(1, device=device).item()


def test_each_kind_of_bytes_is_counted_once() -> None:
    """Tied weights count once, frozen ones without a gradient, and buffers by their own dtype."""
    trained = 40 + 18 + 2
    steps = 3 * 4  # AdamW counts them in a tensor for each parameter
    assert to_builtins(memory.count(Tied)) == {
        "weight_bytes": 4 * (trained + 4) + 40,
        "gradient_bytes": 4 * trained,
        "optimizer_bytes": 8 * trained + steps,
        "cast_bytes": 2 * (trained + 4),
    }


def test_it_is_what_real_tensors_take() -> None:
    """Counted bytes equal those of two real networks and their optimizers after a step."""
    config = parse_config(WGANGP, {})
    recipe = WGANGP(config, torch.device("cpu"))
    for optimizer in recipe.optimizers.values():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    states = [s for o in recipe.optimizers.values() for s in o.state.values()]
    tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    weights = [p for module in recipe.modules.values() for p in module.parameters()]
    counted = memory.count(WGANGP)
    assert counted.optimizer_bytes == sum(t.numel() * t.element_size() for t in tensors)
    assert counted.gradient_bytes == 4 * sum(p.numel() for p in weights)


def test_what_cannot_be_counted_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe that cannot be counted affects no other."""
    known = {"tied": Tied, "reading": Reading}
    monkeypatch.setattr(memory, "load_recipe", known.__getitem__)
    monkeypatch.setattr(memory.sys, "argv", ["memory", "reading", "tied"])
    monkeypatch.setattr(memory.os, "nice", lambda _by: 0)
    memory.main()
    said = capsys.readouterr()
    assert list(json.loads(said.out)) == ["tied"]
    assert said.err.startswith("reading: RuntimeError")
