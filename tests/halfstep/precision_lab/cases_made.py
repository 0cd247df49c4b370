"""Models with one module that loses precision, and models without any."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.halfstep.precision_lab.models_made import (
    WIDTH,
    Loss,
    Transformer,
    next_token,
    squared_error,
    tokens,
    vectors,
)


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def between(function: Callable[[Tensor], Tensor]) -> nn.Sequential:
    """Return a network whose module 1 is a function."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Function(function), nn.Linear(WIDTH, WIDTH))


def half(x: Tensor) -> Tensor:
    """Return a tensor in half precision, as a layer under autocast on a GPU does."""
    return x.half()


class Scores(nn.Module):
    """Exponentials of large scores, computed in the module's precision."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scores = 40 * self.score(x)
        weights = (scores - scores.detach().amax(-1, keepdim=True)).exp()
        return x * (weights / weights.sum(-1, keepdim=True))


class SumNorm(nn.Module):
    """A norm over a long vector by its plain sum of squares, which overflows fp16."""

    def forward(self, x: Tensor) -> Tensor:
        x = half(x)
        return x * torch.rsqrt((100 * x).square().sum(-1, keepdim=True) / x.shape[-1] + 1e-6)


class Divided(nn.Module):
    """A division by numbers too small for fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        small = torch.sigmoid(self.gate(x)) * 3e-8
        return x * 1e-8 / (small + 1e-8)


class Cancelled(nn.Module):
    """A difference of two large, nearly equal numbers."""

    def forward(self, x: Tensor) -> Tensor:
        x = half(x)
        return (x + 300) - 300


class Accumulated(nn.Module):
    """A running sum in half precision that starts at a large number."""

    def forward(self, x: Tensor) -> Tensor:
        total = half(torch.full_like(x[:, :1], 1000))
        columns = []
        for step in range(WIDTH):
            total = total + half(x[:, step : step + 1].abs())
            columns.append(total)
        return (torch.cat(columns, 1) - 1000) / 10


def half_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return a sum of squares in fp16, which overflows."""
    return ((half(model(batch[0])) * 50).square().sum() / 50**2).float()


def variance_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return a variance by the difference of two moments, in fp16."""
    y = half(model(batch[0])) * 0.01 + 5
    return 1e4 * (y.square().mean() - y.mean().square()).float()


def scale_weights(module: nn.Module, factor: float) -> nn.Module:
    """Multiply a module's weights."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(factor)
    return module


def overflowing() -> nn.Module:
    """Return a network whose first layer has results beyond 65,504."""
    return nn.Sequential(
        scale_weights(nn.Linear(WIDTH, WIDTH), 3e5),
        Function(lambda x: x * 1e-5),
        nn.Linear(WIDTH, WIDTH),
    )


def tiny_weights() -> nn.Module:
    """Return a network with weights that are subnormal in fp16."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        scale_weights(nn.Linear(WIDTH, WIDTH, bias=False), 1e-6),
        Function(lambda x: x.float() * 1e6),
    )


def large_residual() -> nn.Module:
    """Return a transformer whose last block has small gradients behind a large residual stream."""
    model = Transformer()
    scale_weights(model.blocks[0].down, 3e4)
    return model


class Planted(NamedTuple):
    """A model, the modules that a diff must name, and how it is run."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Loss
    named: set[str]
    dtype: torch.dtype = torch.float16
    scale: float | None = None
    #: CUDA's autocast computes exp, powers and sums in fp32, a CPU's does not.
    is_fp32_on_cuda: bool = False


class CosineGate(nn.Module):
    """A cosine of large angles."""

    def __init__(self) -> None:
        super().__init__()
        self.angle = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.cos(50 * self.angle(x))


class Positions(nn.Module):
    """Positions of a long sequence in bf16, which has no integers above 256."""

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(1000, 1000 + x.shape[1]).bfloat16()
        return x + torch.sin(positions.float() * 0.7)


class LogOfOne(nn.Module):
    """log(1 + x) of small x in half precision."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(1 + half(x * 1e-3).abs()) * 1e3


class PlainSoftmax(nn.Module):
    """A softmax without subtracting the maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weights = half(20 * self.score(x)).exp()
        return x * (weights / weights.sum(-1, keepdim=True))


PLANTED: dict[str, Planted] = {
    "exp of large scores": Planted(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Scores()),
        vectors,
        squared_error,
        {"1"},
        is_fp32_on_cuda=True,
    ),
    "softmax without maximum": Planted(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), PlainSoftmax()),
        vectors,
        squared_error,
        {"1"},
        is_fp32_on_cuda=True,
    ),
    "norm by a sum of squares": Planted(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), SumNorm()),
        vectors,
        squared_error,
        {"1"},
        is_fp32_on_cuda=True,
    ),
    "division by small numbers": Planted(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Divided()), vectors, squared_error, {"1"}
    ),
    "cancellation": Planted(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Cancelled(), nn.Linear(WIDTH, WIDTH)),
        vectors,
        squared_error,
        {"1"},
    ),
    "running sum": Planted(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Accumulated()), vectors, squared_error, {"1"}
    ),
    "loss in fp16": Planted(
        lambda: nn.Linear(WIDTH, WIDTH), vectors, half_loss, {"(loss)"}, is_fp32_on_cuda=True
    ),
    "variance in the loss": Planted(
        lambda: nn.Linear(WIDTH, WIDTH), vectors, variance_loss, {"(loss)"}
    ),
    "overflow of a layer": Planted(overflowing, vectors, squared_error, {"0"}),
    "weights that underflow": Planted(tiny_weights, vectors, squared_error, {"1"}),
    "cosine of large angles": Planted(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), CosineGate()), vectors, squared_error, {"1"}
    ),
    "log of nearly one": Planted(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), LogOfOne()), vectors, squared_error, {"1"}
    ),
    "positions in bf16": Planted(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Positions(), nn.Linear(WIDTH, WIDTH)),
        vectors,
        squared_error,
        {"1"},
        torch.bfloat16,
    ),
    "cosine in bf16": Planted(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), CosineGate()),
        vectors,
        squared_error,
        {"1"},
        torch.bfloat16,
    ),
    "gradients that underflow without a scale": Planted(
        large_residual,
        tokens,
        next_token,
        {"blocks.1"},  # its residual addition passes them to its branches in fp16
        scale=1.0,
    ),
}
