"""The benchmark of PyTorch's AMP recipe: three wide linear layers on random data.

Measured there in 2020 on one GPU: 9.405 s in default precision, 2.712 s with autocast, 3.113 s
with autocast and GradScaler. Every size is a setting, so that a CPU can run it small:

    halfstep recipe train mlp --set recipe.width=64 --set training.batch_size=32

The tutorial's table, a process for each precision, with the settings that are given:

    python -m trainer.recipes.mlp --set recipe.width=64

Source: https://docs.pytorch.org/tutorials/recipes/recipes/amp_recipe.html
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from halfstep.recipe import Loss, Recipe, RecipeConfig, RunConfig
from halfstep.watching.flops import count_flops


class MLPConfig(RecipeConfig):
    """Sizes of the benchmark. Its total time and peak memory are the run's final metrics."""

    learning_rate: float = Field(
        1e-3, gt=0, title="Learning rate", description="Learning rate of SGD."
    )
    width: int = Field(
        4096, ge=1, le=65536, title="Width", description="Inputs, hidden units and outputs."
    )
    layers: int = Field(3, ge=1, le=1000, title="Layers", description="Linear layers.")
    batches: int = Field(
        50,
        ge=1,
        title="Batches",
        description="Random batches kept on the device; 3 epochs of 50 batches are 150 steps.",
    )


class MLP(Recipe):
    """Linear layers with ReLU between them, mean squared error, SGD."""

    name: ClassVar = "mlp"
    title: ClassVar = "AMP benchmark"
    description: ClassVar = "Measures wide linear layers on random data, like PyTorch's AMP recipe."
    Config: ClassVar = MLPConfig
    # As in the tutorial: no clipping, a scale of 2^16, and whichever algorithm is fastest.
    defaults: ClassVar = {
        "training": {
            "steps": 150,
            "batch_size": 512,
            "max_grad_norm": None,
            "deterministic": False,
        }
    }

    def __init__(self, config: RunConfig[MLPConfig], device: torch.device) -> None:
        settings, width = config.recipe, config.recipe.width
        self.device = device
        self.train_size = settings.batches * config.training.batch_size
        self.inputs = torch.randn(self.train_size, width, device=device)
        self.targets = torch.randn(self.train_size, width, device=device)

        self.settings = settings
        model = make_layers(settings).to(device)
        self.modules = {"model": model}
        self.optimizers = {
            "sgd": torch.optim.SGD(
                model.parameters(), lr=settings.learning_rate, fused=config.training.fused
            )
        }

    def batch(self, indices: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, each (B, width)."""
        rows = indices.to(self.device, non_blocking=True)
        return self.inputs[rows], self.targets[rows]

    def training_step(self, batch: Any) -> Iterator[Loss]:
        """Yield the mean squared error."""
        inputs, targets = batch
        yield Loss(F.mse_loss(self.modules["model"](inputs), targets), optimizer="sgd")

    def flops(self) -> float:
        """Count the operations of one row."""
        with torch.device("meta"):
            model, row = make_layers(self.settings), torch.zeros(1, self.settings.width)
        return count_flops(lambda: F.mse_loss(model(row), row))


def make_layers(settings: MLPConfig) -> nn.Sequential:
    """Return the network."""
    layers: list[nn.Module] = []
    for _ in range(settings.layers - 1):
        layers += [nn.Linear(settings.width, settings.width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(settings.width, settings.width))


ROWS = {  # the tutorial's three, and bf16
    "fp32": ["--precision", "fp32"],
    "fp16 without scaler": ["--precision", "fp16", "--set", "scaler.enabled=false"],
    "fp16": ["--precision", "fp16"],
    "bf16": ["--precision", "bf16"],
}


def print_table(arguments: list[str]) -> None:
    """Train in each precision; print time, peak memory, and the ratio of each to fp32's.

    The ratios are fp32 / precision for time, as speed-ups are, and precision / fp32 for memory.
    """
    sys.stdout.write("| precision | seconds | faster | peak MB | memory |\n|---|---|---|---|---|\n")
    first = None
    for name, settings in ROWS.items():
        command = [sys.executable, "-m", "trainer", "mlp", *settings, *arguments]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        seconds, peak = (
            float(re.findall(rf"{label} = ([\d.]+)", output)[0])
            for label in ("Total execution time", "Max memory used by tensors")
        )
        first = first or (seconds, peak)
        sys.stdout.write(
            f"| {name} | {seconds:.3f} | {first[0] / seconds:.2f}× | {peak / 1e6:.0f} "
            f"| {peak / first[1]:.2f}× |\n"
        )


if __name__ == "__main__":
    print_table(sys.argv[1:])
