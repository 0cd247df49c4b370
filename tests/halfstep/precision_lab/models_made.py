"""Small models for precision diffs, with and without a planted loss of precision."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 32
Loss = Callable[[nn.Module, Any], Tensor]


def squared_error(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean squared error against the second half of the batch."""
    return F.mse_loss(model(batch[0]).float(), batch[1])


def vectors(rows: int = 16, inputs: int = WIDTH, outputs: int = WIDTH) -> tuple[Tensor, Tensor]:
    """Return random inputs and targets."""
    return torch.randn(rows, inputs), torch.randn(rows, outputs)


class Attention(nn.Module):
    """Multi-head attention by one function between two projections."""

    def __init__(self, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        split = self.qkv(x).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """A language model with tied weights, optionally with activation checkpointing."""

    def __init__(self, blocks: int = 2, width: int = WIDTH, *, is_checkpointed: bool = False):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(17, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 17, bias=False)
        self.head.weight = self.tokens.weight
        self.is_checkpointed = is_checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(self.norm(x))


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the cross entropy of the next tokens."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


class Convolutions(nn.Module):
    """Convolutions with batch norm, in-place ReLU and a residual that is added in place."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.dropout = nn.Dropout2d(0.2)
        self.head = nn.Linear(channels, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.first(x)))
        y = self.dropout(self.second(x))
        y += x
        return self.head(self.relu(y).mean((2, 3)))


def classes(model: nn.Module, batch: Any) -> Tensor:
    """Return the cross entropy of classes."""
    return F.cross_entropy(model(batch[0]).float(), batch[1])


class Recurrent(nn.Module):
    """A recurrent cell that is called at each step of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], WIDTH)
        for step in range(4):
            state = self.cell(x[:, step * 8 : step * 8 + 8], state)
        return self.head(state)


@dataclass(frozen=True)
class Pair:
    """Output of a module in a dataclass."""

    hidden: Tensor
    gate: Tensor


class Gated(nn.Module):
    """A module that returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, sharpness: Tensor) -> Pair:
        return Pair(self.hidden(x), torch.sigmoid(self.gate(x) * sharpness))


class Trees(nn.Module):
    """Modules that take and return dictionaries, tuples and dataclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.gated, self.join = Gated(), Join()

    def forward(self, x: Tensor) -> Tensor:
        pair = self.gated(x, sharpness=x.new_tensor(2.0))
        return self.join({"pair": (pair.hidden, pair.gate), "scale": 0.5})["joined"]


class Join(nn.Module):
    """A module that takes and returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, parts: dict[str, Any]) -> dict[str, Tensor]:
        hidden, gate = parts["pair"]
        return {"joined": self.out(hidden * gate) * parts["scale"]}


class Doubled(torch.autograd.Function):
    """A custom function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return gradient * s * (1 + x * (1 - s))


class Custom(nn.Module):
    """A custom function, and autocast regions inside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = Doubled.apply(self.first(x))
            with torch.autocast("cpu", enabled=False):
                x = self.middle(x.float())
        return self.last(x)


class WithLoss(nn.Module):
    """A model that returns its loss and its outputs, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(x))
        out = self.head(hidden)
        return {"loss": F.mse_loss(out.float(), target), "out": out, "hidden": hidden}


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return a model's own loss, and a penalty on its other result."""
    result = model(*batch)
    penalty: Tensor = result["loss"] + 0.1 * result["hidden"].float().square().mean()
    return penalty


def tokens() -> Tensor:
    """Return a batch of tokens."""
    return torch.randint(0, 17, (4, 13))


def images() -> tuple[Tensor, Tensor]:
    """Return images and their classes."""
    return torch.randn(6, 3, 8, 8), torch.randint(0, 4, (6,))


def chain(depth: int = 4, width: int = WIDTH) -> nn.Sequential:
    """Return a chain of linear layers without nonlinearities."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))


class Last(nn.Module):
    """A recurrent network over the parts of a vector."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.head = network, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _state = self.network(x.view(x.shape[0], 4, 8))
        return self.head(outputs[:, -1])


class SelfAttention(nn.Module):
    """torch's own attention, which uses its output projection without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(x.shape[0], 4, 8)
        y, _weights = self.attention(x, x, x)
        return (x + y).flatten(1)


class Counting(nn.Module):
    """A module that changes attributes, buffers and its own weights in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.history: list[int] = []
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.plain = torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(self.calls)
        self.linear.weight.data.clamp_(-0.15, 0.15)
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.plain.mul_(0.99)
        x.sub_(self.mean)  # overwrites the batch
        return self.linear(x) * self.plain * (0.5 + torch.rand(()))


def frozen(model: Transformer) -> Transformer:
    """Freeze a part of a model."""
    model.blocks[0].requires_grad_(False)
    return model


#: Model, batch, loss.
Case = tuple[Callable[[], nn.Module], Callable[[], Any], Loss]
MODELS: dict[str, Case] = {
    "chain": (chain, vectors, squared_error),
    "transformer": (Transformer, tokens, next_token),
    "checkpointed": (lambda: Transformer(is_checkpointed=True), tokens, next_token),
    "convolutions": (Convolutions, images, classes),
    "recurrent": (Recurrent, vectors, squared_error),
    "gru": (lambda: Last(nn.GRU(8, WIDTH, batch_first=True)), vectors, squared_error),
    "trees": (Trees, vectors, squared_error),
    "own loss": (WithLoss, vectors, own_loss),
    "custom": (Custom, vectors, squared_error),
    "multihead": (SelfAttention, vectors, squared_error),
    "spectral": (
        lambda: nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
            nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
            nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        ),
        vectors,
        squared_error,
    ),
    "counting": (Counting, vectors, squared_error),
    "evaluated": (lambda: Convolutions().eval(), images, classes),
    "frozen": (lambda: frozen(Transformer()), tokens, next_token),
}
#: Of different kinds, for `make test`.
USUAL = ("chain", "transformer", "checkpointed", "convolutions", "custom")
