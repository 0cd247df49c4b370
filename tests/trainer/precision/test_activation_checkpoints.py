from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrizations import spectral_norm

from halfstep.recipe import Loss
from halfstep.run_config import ConfigError
from tests.marks import extended
from tests.trainer.conftest import Regression, assert_same_bits
from tests.trainer.diagnosis.replay_made import PlantedBackward
from trainer.precision import activation_checkpoints
from trainer.precision.activation_checkpoints import keep_no_activations
from trainer.recipes.gpt import GPT


class Deep(Regression):
    """Dropout, BatchNorm and a spectral norm, which a second forward may compute differently."""

    def __init__(self, config, device):
        super().__init__(config, device)
        body = nn.Sequential(
            nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.5),
            spectral_norm(nn.Linear(32, 8)), nn.Tanh(),
        )  # fmt: skip
        model = nn.Sequential(body, nn.Linear(8, 1))
        self.modules = {"model": model}
        self.optimizers = {"sgd": torch.optim.SGD(model.parameters(), lr=1e-2, fused=True)}

    def training_step(self, batch):
        inputs, targets = batch
        yield Loss(F.mse_loss(self.modules["model"](inputs).float(), targets), "sgd")


FP16 = {"precision": "fp16", "scaler": {"init_scale": 1024.0}}
HERE = {"modules": {"checkpointed": ["model.0"]}}


@pytest.mark.parametrize("more", [{}, *extended([{"modules": {"fp32": ["model.0.4"]}}])])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_no_bit_is_different(run_loop, precision, more):
    """Weights, running statistics and spectral vectors equal those without checkpointing."""
    values = FP16 | {"precision": precision}
    plain = run_loop(Deep, values | more)
    merged = {"modules": more.get("modules", {}) | HERE["modules"]}
    run = run_loop(Deep, values | merged)
    assert_same_bits(run.weights(), plain.weights())
    assert run.records["loss"].tolist() == plain.records["loss"].tolist()
    assert run.records["grad_norm"].tolist() == plain.records["grad_norm"].tolist()


@pytest.mark.slow
def test_blocks_of_a_transformer_by_pattern(run_loop):
    """A pattern selects a transformer's blocks for checkpointing, without a recipe change."""
    values = {
        "training": {"steps": 2, "batch_size": 2, "accumulation_steps": 2},
        "recipe": {"layers": 2, "heads": 2, "width": 16, "context": 8},
    }
    plain = run_loop(GPT, values)
    run = run_loop(GPT, values | {"modules": {"checkpointed": ["model.blocks.*"]}})
    assert_same_bits(run.weights(), plain.weights())


def count_kept_bytes(network: nn.Module) -> int:
    """Return the number of bytes saved for the backward pass."""
    kept = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor.nbytes), lambda _: None):
        network(torch.randn(64, 6))
    return sum(kept)


def test_only_inputs_are_saved():
    """No activation of a checkpointed module is saved besides its inputs."""
    network = nn.Sequential(nn.Linear(6, 256), nn.Tanh(), nn.Linear(256, 1))
    before = count_kept_bytes(network)
    keep_no_activations(network)
    assert count_kept_bytes(network) < before / 10


def test_without_gradients_it_is_called_plainly(monkeypatch):
    """Without gradients a checkpointed module is called directly, without copies of buffers."""
    network = nn.BatchNorm1d(2)
    keep_no_activations(network)
    monkeypatch.setattr(activation_checkpoints, "_copy", pytest.fail)
    with torch.no_grad():
        assert network(torch.ones(2, 2)).shape == (2, 2)


@pytest.mark.slow
def test_a_compiled_run_has_them_too(run_loop, monkeypatch):
    """Activation checkpoints work with compilation, also for modules with buffers, which stay
    uncompiled.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    values = FP16 | {"training": {"steps": 3}}
    run = run_loop(Deep, values | HERE)
    compiled = run_loop(Deep, FP16 | {"training": {"steps": 3, "compile": True}} | HERE)
    np.testing.assert_allclose(compiled.records["loss"], run.records["loss"], rtol=1e-2)


@pytest.mark.slow
def test_one_without_buffers_compiles_to_one_graph():
    """A checkpointed module without buffers compiles to one graph."""
    network = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    keep_no_activations(network[0])
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    compiled(torch.ones(2, 6)).sum().backward()
    assert network[0].weight.grad is not None


@pytest.mark.slow
def test_a_replay_finds_the_module_all_the_same(run_loop):
    """A replay names an overflow within a checkpointed module exactly."""
    run = run_loop(PlantedBackward, {"modules": {"checkpointed": ["model.0"]}})
    plain = run_loop(PlantedBackward)
    assert run.of("replay") == plain.of("replay") != []


def test_an_unknown_name_is_reported(run_loop):
    """The error for an unknown module names the field."""
    with pytest.raises(ConfigError, match=r'modules\.checkpointed: no module is named "blocks"'):
        run_loop(Deep, {"modules": {"checkpointed": ["blocks"]}})
