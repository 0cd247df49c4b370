"""Shared helpers of the tests of replay."""

from typing import ClassVar

import torch
from torch import nn

from tests.trainer.conftest import Regression


class Plain(nn.Module):
    """A layer without an overflow, in fp16 under autocast."""

    def forward(self, x):
        return x.half()


class BackwardPlant(nn.Module):
    """The identity, whose backward pass multiplies gradients of large activations by 60,000."""

    def forward(self, x):
        x = x.half()
        return x + (x - x.detach()) * _factor(x)


def _factor(x):
    # Of eight examples only one far from all others is normalised to more than 2.64.
    return torch.where(x.detach() > 2.64, 60000.0, 1.0).half()


class Planted(Regression):
    """512 examples with one outlier, through BatchNorm, a planted overflow and dropout."""

    name: ClassVar = "planted"
    defaults: ClassVar = {
        "training": {"steps": 150, "batch_size": 8},
        "scaler": {"init_scale": 1024.0},
    }
    plant: ClassVar = Plain

    def __init__(self, config, device):
        self.device, self.train_size = device, 512
        self.inputs = torch.randn(512, 6)
        self.inputs[7] = 1000.0
        self.targets = self.inputs.clamp(-3, 3).sum(dim=1, keepdim=True)
        block = nn.Sequential(nn.BatchNorm1d(6), nn.Identity(), self.plant(), nn.Dropout(0.2))
        model = nn.Sequential(block, nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.modules = {"model": model}
        self.optimizers = {
            "sgd": torch.optim.SGD(model.parameters(), lr=1e-3, fused=config.training.fused)
        }


class PlantedBackward(Planted):
    plant: ClassVar = BackwardPlant
