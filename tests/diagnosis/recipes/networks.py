"""Small recipes, most of them with one mistake."""

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from halfstep.recipe import Loss, Recipe, RecipeConfig, RunConfig
from tests.diagnosis.parts import ConvNet, mlp

SIZE = 320


class Config(RecipeConfig):
    """Common settings of the recipes."""

    learning_rate: float = Field(0.01, gt=0)


class Sound(Recipe):
    """A learnable classifier without a mistake."""

    name: ClassVar = "sound"
    title: ClassVar = "Sound"
    description: ClassVar = "For the corpus."
    Config: ClassVar = Config
    defaults: ClassVar = {
        "training": {"steps": 120, "batch_size": 32},
        "evaluation": {"every_steps": 60},
        "scaler": {"init_scale": 2.0**12},
    }

    def __init__(self, config: RunConfig[Config], device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.device, self.train_size = device, SIZE
        x = torch.randn(SIZE, *self.shape, generator=generator)
        self.y = x.flatten(1)[:, :4].argmax(1).to(device)
        self.x = self.change(x).to(device)
        self.modules = {"model": self.network().to(device)}
        self.optimizers = {
            "adamw": torch.optim.AdamW(
                self.modules["model"].parameters(),
                lr=config.recipe.learning_rate,
                fused=config.training.fused,
            )
        }

    shape: ClassVar[tuple[int, ...]] = (8,)

    def network(self) -> nn.Module:
        return mlp()

    def change(self, x: Tensor) -> Tensor:
        """Return the inputs as the recipe has them."""
        return x

    def batch(self, indices: Tensor, generator: torch.Generator) -> Any:
        rows = indices.to(self.device, non_blocking=True)
        return self.x[rows], self.y[rows]

    def training_step(self, batch: Any) -> Iterator[Loss]:
        x, y = batch
        yield Loss(self.loss(self.modules["model"](x), x, y), optimizer="adamw")

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y)

    def evaluate(self) -> dict[str, float]:
        out = self.modules["model"](self.x).float()
        return {"val/accuracy": (out.argmax(1) == self.y).float().mean().item()}


class Convolutional(Sound):
    """A convolution with BatchNorm."""

    name: ClassVar = "convolutional"
    shape: ClassVar = (1, 8, 8)

    def network(self) -> nn.Module:
        return ConvNet()


class RootAtZero(Sound):
    """The distance of two equal outputs, masked by where: its derivative is NaN."""

    name: ClassVar = "root_at_zero"

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        again = self.modules["model"](x)
        apart = (out.float() - again.float()).square().sum(1)
        distance = torch.where(apart > 0, apart.sqrt(), torch.zeros_like(apart))
        return F.cross_entropy(out, y) + distance.mean()


class LossOfZero(Sound):
    """A loss whose weight is 0."""

    name: ClassVar = "loss_of_zero"
    defaults: ClassVar = {
        **Sound.defaults,
        "scaler": {"init_scale": 2.0**12, "growth_interval": 5},
    }

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return (out.float() * 0).square().mean()


class WideInputs(Sound):
    """Inputs of raw counts and a first layer of large weights."""

    name: ClassVar = "wide_inputs"

    def network(self) -> nn.Module:
        net = mlp()
        with torch.no_grad():
            net[0].weight.mul_(400)
        return net

    def change(self, x: Tensor) -> Tensor:
        return 300 * x


class SteepLoss(Sound):
    """Tiny activations times 2^14, with a gradient that overflows at every scale above 1."""

    name: ClassVar = "steep_loss"
    defaults: ClassVar = {
        "training": {"steps": 120, "batch_size": 32},
        "evaluation": {"every_steps": 60},
        "scaler": {"init_scale": 2.0**16, "growth_interval": 2},
    }

    def network(self) -> nn.Module:
        net = mlp()
        with torch.no_grad():
            net[2].weight.mul_(2.0**-14)
            net[2].bias.mul_(2.0**-14)
        return net

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return 64 * F.cross_entropy(out * 2.0**14, y)


class MissingValues(Sound):
    """Inputs with a missing reading in every tenth example."""

    name: ClassVar = "missing_values"

    def change(self, x: Tensor) -> Tensor:
        x[::10, 2] = math.nan
        return x

    def evaluate(self) -> dict[str, float]:
        return {}


class UnusedHead(Sound):
    """A second head that the loss does not use."""

    name: ClassVar = "unused_head"
    defaults: ClassVar = {**Sound.defaults, "training": {"steps": 200, "batch_size": 32}}

    def network(self) -> nn.Module:
        return nn.ModuleDict({"head": mlp(), "auxiliary": nn.Linear(8, 4)})

    def training_step(self, batch: Any) -> Iterator[Loss]:
        x, y = batch
        net = self.modules["model"]
        net["auxiliary"](x)
        yield Loss(F.cross_entropy(net["head"](x), y), optimizer="adamw")

    def evaluate(self) -> dict[str, float]:
        return {}


class BrightPicture(Convolutional):
    """One image per epoch that overflows before BatchNorm."""

    name: ClassVar = "bright_picture"
    defaults: ClassVar = {
        **Sound.defaults,
        "scaler": {"init_scale": 2.0**12, "restore_buffers": False},
    }

    def change(self, x: Tensor) -> Tensor:
        x[7] *= 1e6
        return x

    def evaluate(self) -> dict[str, float]:
        return {}


class RateBeyondReason(Sound):
    """A squared error with a learning rate at which each step is larger than the last."""

    name: ClassVar = "rate_beyond_reason"
    defaults: ClassVar = {
        **Sound.defaults,
        "training": {"steps": 120, "batch_size": 32, "max_grad_norm": None},
    }

    def __init__(self, config: RunConfig[Config], device: torch.device) -> None:
        super().__init__(config, device)
        self.optimizers = {"adamw": torch.optim.SGD(self.modules["model"].parameters(), lr=50.0)}

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return (out.float() - x[:, :4].float()).square().mean()

    def evaluate(self) -> dict[str, float]:
        return {}


class EmptyValidation(Sound):
    """A validation loss over no examples, which is NaN."""

    name: ClassVar = "empty_validation"

    def evaluate(self) -> dict[str, float]:
        out = self.modules["model"](self.x[:0]).float()
        return {"val/loss": F.cross_entropy(out, self.y[:0]).item()}
