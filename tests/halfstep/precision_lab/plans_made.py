"""Models with one part that needs more precision than autocast gives it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.halfstep.precision_lab.cases_made import (
    Divided,
    Function,
    between,
    overflowing,
    tiny_weights,
)
from tests.halfstep.precision_lab.models_made import (
    WIDTH,
    Block,
    Loss,
    Transformer,
    next_token,
    squared_error,
    tokens,
    vectors,
)


class Exponentials(nn.Module):
    """A softmax of large scores."""

    def __init__(self, sharpness: float) -> None:
        super().__init__()
        self.score, self.sharpness = nn.Linear(WIDTH, WIDTH), sharpness

    def forward(self, x: Tensor) -> Tensor:
        scores = self.sharpness * self.score(x)
        weights = (scores - scores.detach().amax(-1, keepdim=True)).exp()
        return x * (weights / weights.sum(-1, keepdim=True))


def long_norm(x: Tensor) -> Tensor:
    """Normalise over a long sequence by its plain sum of squares, which overflows fp16."""
    long = x.repeat(1, 64)  # (B, 64 W)
    return x * torch.rsqrt((20 * long).square().sum(-1, keepdim=True) / long.shape[-1] + 1e-6)


def cancel(offset: float) -> Callable[[Tensor], Tensor]:
    """Return a function that adds a number and subtracts it again."""
    return lambda x: (x + offset) - offset


def plain_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return a sum of squares of the model's output, which overflows fp16."""
    return (model(batch[0]) * 50).square().sum() / 50**2


class CancelledBlock(Block):
    """A block of a transformer with a cancellation in its first branch."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.shift = Function(cancel(offset))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift(self.up(x)[..., :WIDTH]))


def transformer(offsets: list[float]) -> nn.Module:
    """Return a transformer whose blocks add and subtract these offsets."""
    model = Transformer(blocks=0)
    model.blocks.extend(CancelledBlock(offset) for offset in offsets)
    return model


#: Bounds that these models exceed: five rounding units of bf16.
STRICT = {"max_error": 0.02, "min_cosine": 0.999}


class Needed(NamedTuple):
    """A model, and the modules that a plan must name in fp16 and in bf16 (None: any)."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Loss
    fp16: set[str]
    bf16: set[str] | None


PLANS: dict[str, Needed] = {
    "exp of large scores": Needed(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Exponentials(200)),
        vectors,
        squared_error,
        {"1"},
        None,  # there the scores' arguments are too coarse as well
    ),
    "norm over a long sequence": Needed(
        lambda: between(long_norm), vectors, squared_error, {"1"}, set()
    ),
    "loss in fp16": Needed(lambda: nn.Linear(WIDTH, WIDTH), vectors, plain_loss, {"(loss)"}, set()),
    "division by small numbers": Needed(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Divided()),
        vectors,
        squared_error,
        {"1"},
        set(),
    ),
    "cancellation": Needed(lambda: between(cancel(300)), vectors, squared_error, {"1"}, {"1"}),
    "overflow of a layer": Needed(overflowing, vectors, squared_error, {"0"}, set()),
    "weights that underflow": Needed(tiny_weights, vectors, squared_error, {"1"}, set()),
    "one block of four": Needed(
        lambda: transformer([0, 0, 300, 0]), tokens, next_token, {"blocks.2.shift"}, None
    ),
    "every block": Needed(
        lambda: transformer([300, 300, 300]), tokens, next_token, {"blocks.*.shift"}, None
    ),
}
