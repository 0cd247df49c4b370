"""Networks and data that the corpus' loops share, drawn from their own seeds."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

#: Where the loops train: "cuda" in `make gpu-corpus`; "unreadable" is a CPU watched like a GPU.
DEVICE = os.environ.get("HALFSTEP_DIAGNOSIS_DEVICE", "cpu").replace("unreadable", "cpu")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def autocast(precision: str) -> AbstractContextManager[object]:
    """Return the autocast context of a loop in this precision."""
    return torch.autocast(DEVICE, DTYPES[precision]) if precision in DTYPES else nullcontext()


def grad_scaler(scale: float = 2.0**12, growth_interval: int = 2000) -> torch.amp.GradScaler:
    """Return a scaler with a scale that fits small networks."""
    return torch.amp.GradScaler(DEVICE, init_scale=scale, growth_interval=growth_interval)


def make_generator(seed: int) -> torch.Generator:
    """Return a random generator on the loops' device."""
    return torch.Generator(DEVICE).manual_seed(seed)


def mlp(inputs: int = 8, width: int = 32, outputs: int = 4) -> nn.Sequential:
    """Return two linear layers."""
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))


class ConvNet(nn.Module):
    """Convolution, BatchNorm and a head, for pictures of (B, 1, 8, 8)."""

    def __init__(self, outputs: int = 4) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        out: Tensor = self.head(x.flatten(1))
        return out


class Block(nn.Module):
    """A transformer block with hand-written attention; temperature multiplies its scores."""

    def __init__(self, width: int = 32, temperature: float = 1.0) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.mlp = nn.Linear(width, width), mlp(width, 2 * width, width)
        self.temperature = temperature

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the block. x: (B, T, C); mask: what is added to the scores."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1) * (self.temperature / q.shape[-1] ** 0.5)
        if mask is not None:
            scores = scores + mask
        x = x + self.out(scores.softmax(-1).to(v.dtype) @ v)
        out: Tensor = x + self.mlp(x)
        return out


class TinyGPT(nn.Module):
    """Two blocks over tokens; mask: additive and causal."""

    def __init__(self, vocabulary: int = 17, width: int = 32, temperature: float = 1.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, temperature) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits. tokens: (B, T); returns (B, T, V)."""
        x = self.embedding(tokens)
        mask = torch.full((tokens.shape[1],) * 2, float("-inf")).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        out: Tensor = self.head(x)
        return out


class GRUNet(nn.Module):
    """A GRU and a head on its last state, for (B, T, 4)."""

    def __init__(self, outputs: int = 4) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 16, batch_first=True), nn.Linear(16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(x)[0][:, -1])
        return out


def draw_labelled(
    steps: int, shape: tuple[int, ...] = (8,), *, batch: int = 32, classes: int = 4, seed: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield learnable batches: the label is where the first numbers are largest."""
    generator = make_generator(seed)
    for _ in range(steps):
        x = torch.randn(batch, *shape, generator=generator)
        yield x, x.flatten(1)[:, :classes].argmax(1)


def tokens(steps: int, *, batch: int = 8, length: int = 12, seed: int = 1) -> Iterator[Tensor]:
    """Yield sequences that count up by a random step modulo 17: (B, T + 1)."""
    generator = make_generator(seed)
    for _ in range(steps):
        first = torch.randint(0, 17, (batch, 1), generator=generator)
        stride = torch.randint(1, 4, (batch, 1), generator=generator)
        yield (first + stride * torch.arange(length + 1)) % 17
