"""Numbers beyond fp16's 65,504, in the forward and in the backward pass."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.diagnosis.parts import DEVICE, Block, ConvNet, autocast, draw_labelled, grad_scaler, mlp
from tests.diagnosis.registry import SCALE, WatchCall, loop

#: The loss itself is not finite: no scale has a part in it.
FORWARD = {*SCALE, "zero_grad", "unscale", "restore", "eps"}
BACKWARD = {"larger_scale", "eps", "zero_grad", "restore", "unscale"}


@loop(cause="forward_overflow", harmful=FORWARD, variants=[{"fused": False}, {"fused": True}])
def wide_activations(watch: WatchCall, fused: bool = False) -> None:
    """Inputs of raw sensor counts make the first layer's outputs larger than fp16 holds."""
    net = mlp()
    with torch.no_grad():
        net[0].weight.mul_(400)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=fused)
    scaler = grad_scaler()
    watch(net, name="wide")
    for x, y in draw_labelled(80):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x * 300), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause="forward_overflow", harmful=FORWARD, variants=[{"clip": 1.0}, {"clip": 0.0}])
def squared_error_in_half(watch: WatchCall, clip: float = 0.0) -> None:
    """A squared error by hand, of targets around 400: its squares overflow in fp16."""
    net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    scaler = grad_scaler()
    watch(net, name="squares")
    for x, _ in draw_labelled(80):
        target = 300 * x.sum(1, keepdim=True)
        with autocast("fp16"):
            loss = (net(x) - target.half()).pow(2).mean()
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()


class ExponentialHead(nn.Module):
    """A head whose rate is the exponential of a linear layer, as a Poisson regression has it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.rate = nn.Linear(8, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.rate(torch.tanh(self.body(x))).exp()


@loop(cause="forward_overflow", harmful=FORWARD)
def exponential_in_half(watch: WatchCall) -> None:
    """exp of more than 11.1 is infinite in fp16, and 2^17 or so in fp32."""
    net = ExponentialHead()
    with torch.no_grad():
        net.rate.bias.fill_(12.0)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    scaler = grad_scaler(2.0**4)
    watch(net, name="poisson")
    for x, _ in draw_labelled(60):
        optimizer.zero_grad()
        with autocast("fp16"):
            rate = net(x)
        loss = (rate.float() / 2.0**17 - 1).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


class AttentionClassifier(nn.Module):
    """Attention with scores that are not divided by the root of the width."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.block, self.head = Block(32, temperature), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, T, 32)."""
        return self.head(self.block(x)[:, 0])


@loop(cause="forward_overflow", harmful=FORWARD)
def attention_scores(watch: WatchCall) -> None:
    """Scores of a large temperature overflow, and softmax makes NaN of two infinities."""
    net = AttentionClassifier(temperature=3e6)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = grad_scaler()
    watch(net, name="scores")
    for number, (x, y) in enumerate(draw_labelled(100, (6, 32), batch=16)):
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y) / 2
        scaler.scale(loss).backward()
        if number % 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


class Gain(nn.Module):
    """Multiplies by a constant, forward and back."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


@loop(cause="backward_overflow", harmful=BACKWARD, variants=[{"fused": False}, {"fused": True}])
def steep_loss(watch: WatchCall, fused: bool = False) -> None:
    """Tiny activations times 2^15 twice: each gradient is 2^30 of the next, and the scale sinks."""
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4), Gain(2.0**14))
    with torch.no_grad():
        net[2].weight.mul_(2.0**-14)
        net[2].bias.mul_(2.0**-14)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-9, fused=fused)
    scaler = grad_scaler(2.0**16, growth_interval=2)
    watch(net, name="steep")
    for x, y in draw_labelled(120):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = 64 * F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause="backward_overflow", harmful=BACKWARD, variants=[{"clip": 1.0}, {"clip": 0.0}])
def scale_held_by_hand(watch: WatchCall, clip: float = 0.0) -> None:
    """A loop that keeps the scale at 2^24, where every gradient overflows."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = grad_scaler(2.0**24)
    watch(net, name="held")
    for x, y in draw_labelled(60):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        scaler.step(optimizer)
        scaler.update(2.0**24)


@loop(cause="backward_overflow", harmful=BACKWARD)
def heavy_tailed_batches(watch: WatchCall) -> None:
    """Every fifth batch has gradients 2^14 times as large, and growth is at once."""
    net = ConvNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = grad_scaler(2.0**14, growth_interval=2)
    watch(net, name="tails")
    for number, (x, y) in enumerate(draw_labelled(150, (1, 8, 8))):
        weight = 2.0**14 if number % 5 == 4 else 1.0
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = weight * F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause="backward_overflow", harmful=BACKWARD)
def growth_of_sixteen(watch: WatchCall) -> None:
    """A growth factor of 16 after each applied step: four of five steps are skipped."""
    net = mlp(width=48)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**16, growth_factor=16.0, growth_interval=1)
    watch(net, name="growth")
    for x, y in draw_labelled(150):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(
    cause="forward_overflow",
    harmful={*SCALE, "lower_rate", "zero_grad", "unscale"},
    variants=[{"every": 1}, {"every": 10}],
)
def inputs_beyond_half(watch: WatchCall, every: int = 1) -> None:
    """Numbers of some batches are beyond 65,504, and become inf as autocast converts them."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = grad_scaler()
    watch(net, name="inputs")
    for number, (x, y) in enumerate(draw_labelled(80)):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x if number % every else x * 1e5), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
