"""Non-finite inputs, and non-finite losses or gradients outside of the scaler's steps."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.diagnosis.parts import DEVICE, GRUNet, autocast, draw_labelled, grad_scaler, mlp
from tests.diagnosis.registry import PRECISION, SCALE, WatchCall, loop

INPUTS = {*SCALE, *PRECISION, "lower_rate", "eps", "zero_grad", "unscale", "clip"}
UNSCALED = {*SCALE, "unscale", "restore", "zero_grad"}


@loop(
    cause="nonfinite_inputs",
    harmful=INPUTS,
    variants=[{"precision": "fp16"}, {"precision": "bf16"}, {"precision": "fp32"}],
)
def batch_with_a_nan(watch: WatchCall, precision: str = "fp16") -> None:
    """Every seventh batch has an example with a missing value."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, enabled=precision == "fp16")
    watch(net, name="missing")
    for number, (x, y) in enumerate(draw_labelled(60)):
        if number % 7 == 6:
            x[5, 2] = math.nan
        optimizer.zero_grad()
        with autocast(precision):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause="nonfinite_inputs", harmful=INPUTS)
def one_batch_with_a_nan(watch: WatchCall) -> None:
    """A missing value in a single batch, long after the start."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = grad_scaler(2.0**10)
    watch(net, name="once")
    for number, (x, y) in enumerate(draw_labelled(180)):
        if number == 150:
            x[5, 2] = math.nan
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause="nonfinite_inputs", accepts=("undefined_forward",), harmful=INPUTS)
def constant_pictures(watch: WatchCall) -> None:
    """Each picture is divided by its own deviation, and the third one of each batch is blank."""
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    scaler = grad_scaler()
    watch(net, name="blank")
    for x, y in draw_labelled(50, (1, 8, 8)):
        x[2] = 0.5
        x = (x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True)
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


class Conditioned(nn.Module):
    """A network with two inputs; the second one may be absent."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.condition, self.head = nn.Linear(8, 32), nn.Linear(2, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        hidden = self.body(x)
        if condition is not None:
            hidden = hidden + self.condition(condition)
        out: Tensor = self.head(torch.tanh(hidden))
        return out


@loop(cause="nonfinite_inputs", accepts=("undefined_forward",), harmful=INPUTS)
def condition_of_zero_variance(watch: WatchCall) -> None:
    """The first input is sound; a second one, normalised by a deviation of 0, is not."""
    net = Conditioned()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    scaler = grad_scaler(2.0**10)
    watch(net, name="condition")
    for number, (x, y) in enumerate(draw_labelled(60)):
        level = torch.full((32, 2), 0.25) if number % 4 == 3 else x[:, :2]
        condition = (level - level.mean(0)) / level.std(0)
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x, condition), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


# The loss stays finite, and the batch is gone when its gradient is known: the finding names an inf
# that the forward pass had hidden as one of two possibilities.
@loop(
    cause="nonfinite_inputs",
    accepts=["nonfinite_without_scaler"],
    harmful=INPUTS,
    precision="fp32",
)
def sequence_of_logarithms(watch: WatchCall) -> None:
    """log of prices, some of which are 0: minus infinity goes into a GRU, once."""
    net = GRUNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    watch(net, name="logarithms")
    for number, (x, y) in enumerate(draw_labelled(50, (5, 4))):
        prices = x.exp()
        if number == 25:
            prices[0, 3, 1] = 0.0
        optimizer.zero_grad()
        loss = F.cross_entropy(net(prices.log()), y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()


@loop(
    cause="nonfinite_without_scaler",
    harmful=UNSCALED,
    variants=[{"precision": "fp32"}, {"precision": "bf16"}],
)
def rate_beyond_reason(watch: WatchCall, precision: str = "fp32") -> None:
    """A squared error with a learning rate that makes each step larger than the last."""
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=5.0)
    watch(net, name="rate")
    for x, _ in draw_labelled(60):
        optimizer.zero_grad()
        with autocast(precision):
            out = net(x)
        (out.float() - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()


@loop(cause="nonfinite_without_scaler", harmful=UNSCALED, precision="fp32")
def logarithm_of_zero(watch: WatchCall) -> None:
    """The log of a probability that a sigmoid has brought to exactly 0: the loss is not finite."""
    net = mlp(8, 32, 1)
    with torch.no_grad():
        net[2].bias.fill_(-80.0)
        net[2].weight.mul_(20.0)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    watch(net, name="logarithm")
    for number, (x, _) in enumerate(draw_labelled(60)):
        x = x * (5.0 if number == 30 else 0.1)
        optimizer.zero_grad()
        p = torch.sigmoid(net(x))
        loss = -(p * p.log()).mean()
        loss.backward()
        optimizer.step()


@loop(cause="nonfinite_without_scaler", harmful=UNSCALED)
def half_without_scaler(watch: WatchCall) -> None:
    """A model in fp16 throughout, without autocast or scaler: its activations overflow."""
    net = mlp()
    with torch.no_grad():
        net[0].weight.mul_(50.0)
    net = net.half()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    watch(net, name="half")
    for number, (x, y) in enumerate(draw_labelled(60)):
        x = x.half() * (4000.0 if number == 40 else 0.1)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()


class Recurrence(nn.Module):
    """A linear recurrence over 64 steps, whose matrix is larger than one."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 4)
        with torch.no_grad():
            self.step.weight.copy_(4.0 * torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        state = x * 1e-38
        for _ in range(64):
            state = self.step(state)
        out: Tensor = self.head(state)
        return out


@loop(cause="nonfinite_without_scaler", harmful=UNSCALED, precision="fp32")
def gradient_explodes(watch: WatchCall) -> None:
    """A recurrence whose loss is finite, and whose gradient exceeds fp32's 3e38."""
    net = Recurrence()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    watch(net, name="recurrence")
    for number, (x, y) in enumerate(draw_labelled(50)):
        optimizer.zero_grad()
        weight = 3e38 if number >= 30 else 1.0
        loss = weight * F.cross_entropy(net(x), y) / 3
        loss.backward()
        optimizer.step()


class Normalised(nn.Module):
    """Divides each example by its length."""

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, 8)."""
        return x / x.norm(dim=1, keepdim=True)


class Shares(nn.Module):
    """Divides each example by the sum of its positive numbers, of which it may have none."""

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, 8)."""
        positive = x.relu()
        return positive / positive.sum(1, keepdim=True)


class Logarithms(nn.Module):
    """Takes the logarithms of the sizes of all numbers."""

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, 8)."""
        return x.abs().log()


@loop(
    cause="undefined_forward",
    harmful={*SCALE, "bf16", "lower_rate", "zero_grad"},
    variants=[{"kind": "length"}, {"kind": "share"}, {"kind": "logarithm"}],
)
def division_by_zero(watch: WatchCall, kind: str = "length") -> None:
    """One example in some batches is all zeros, whose length, sum or logarithm is used."""
    first = {"length": Normalised, "share": Shares, "logarithm": Logarithms}[kind]()
    net = nn.Sequential(first, mlp())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = grad_scaler()
    watch(net, name="zeros")
    for number, (x, y) in enumerate(draw_labelled(60)):
        if number % 7 == 3:
            x[3] = 0
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
