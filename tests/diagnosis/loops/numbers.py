"""Numbers that are not finite in buffers and metrics, and an eps that fp16 does not hold."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.diagnosis.parts import (
    DEVICE,
    DTYPES,
    ConvNet,
    TinyGPT,
    autocast,
    draw_labelled,
    grad_scaler,
    mlp,
    tokens,
)
from tests.diagnosis.registry import PRECISION, SCALE, WatchCall, loop

BUFFERS = {*SCALE, "lower_rate", "eps", "zero_grad", "unscale"}
METRIC = {*SCALE, *PRECISION, "lower_rate", "eps", "zero_grad", "unscale", "restore", "clip"}
EPS = {*SCALE, "lower_rate", "clip", "zero_grad", "unscale", "restore"}


@loop(cause="nonfinite_buffers", harmful=BUFFERS, variants=[{"fused": False}, {"fused": True}])
def spike_before_a_norm(watch: WatchCall, fused: bool = False) -> None:
    """One bright batch overflows ahead of BatchNorm: its step is skipped, its statistics stay."""
    net = ConvNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=fused)
    scaler = grad_scaler(2.0**10)
    watch(net, name="spike")
    for number, (x, y) in enumerate(draw_labelled(80, (1, 8, 8))):
        if number == 12:
            x = x * 1e5
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


class Normalised(nn.Module):
    """A network that tracks the mean and variance of its inputs, as agents do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("square", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.05)
            self.square.lerp_(x.detach().square().mean(0), 0.05)
        out: Tensor = self.net(x)
        return out


@loop(cause="nonfinite_buffers", harmful=BUFFERS, precision="bf16")
def observed_statistics(watch: WatchCall) -> None:
    """The square of an observation of 3e19 is infinite in fp32; training never reads it."""
    net = Normalised()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    watch(net, name="observations")
    for number, (x, y) in enumerate(draw_labelled(80)):
        if number == 20:
            x[0, 0] = 3e19
        optimizer.zero_grad()
        with autocast("bf16"):
            loss = F.cross_entropy(net(x)[1:], y[1:])
        loss.backward()
        optimizer.step()


@loop(cause="nonfinite_buffers", harmful=BUFFERS)
def averaged_statistics(watch: WatchCall) -> None:
    """An averaged model takes the buffers along, and with them the infinity of a skipped step."""
    net = ConvNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    average = torch.optim.swa_utils.AveragedModel(net, use_buffers=True)
    scaler = grad_scaler(2.0**10)
    watch(net, average, name="averaged")
    for number, (x, y) in enumerate(draw_labelled(70, (1, 8, 8))):
        if number == 20:
            x[0] *= 3e5
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        average.update_parameters(net)


@loop(
    cause="adam_eps_underflow",
    harmful=EPS,
    variants=[
        {"kind": "Adam"},
        {"kind": "AdamW"},
        {"kind": "AdamW", "fused": True},
        {"kind": "NAdam"},
        {"kind": "RMSprop"},
    ],
)
def eps_in_half(watch: WatchCall, kind: str = "Adam", fused: bool = False) -> None:
    """Weights in fp16, whose eps of 1e-8 is 0 there: a small gradient is divided by 0."""
    net = mlp().half()
    options = {"fused": True} if fused else {}
    optimizer = getattr(torch.optim, kind)(net.parameters(), lr=1e-3, **options)
    watch(net, name="eps")
    for x, y in draw_labelled(40):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x.half()), y)
        loss.backward()
        optimizer.step()


@loop(cause="adam_eps_underflow", harmful=EPS)
def eps_of_a_language_model(watch: WatchCall) -> None:
    """Rows of an embedding that no batch has used have gradients of 0: 0 divided by 0."""
    net = TinyGPT(vocabulary=24).half()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, betas=(0.9, 0.95), eps=1e-8)
    watch(net, name="embedding")
    for batch in tokens(30):
        optimizer.zero_grad(set_to_none=True)
        out = net(batch[:, :-1])
        loss = F.cross_entropy(out.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()


@loop(
    cause="metric_nonfinite",
    harmful=METRIC,
    variants=[{"precision": "fp16"}, {"precision": "bf16"}, {"precision": "fp32"}],
)
def mean_of_no_batch(watch: WatchCall, precision: str = "fp16") -> None:
    """A validation loss over a loader that is empty with drop_last: the mean of nothing is NaN."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, enabled=precision == "fp16")
    handle = watch(net, name="empty")
    for number, (x, y) in enumerate(draw_labelled(90), 1):
        optimizer.zero_grad()
        with autocast(precision):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if number % 30 == 0:
            losses = torch.zeros(0) if number > 30 else torch.ones(2)
            handle.log({"val/loss": losses.mean(), "train/loss": loss})


@loop(cause="metric_nonfinite", harmful=METRIC)
def perplexity_in_half(watch: WatchCall) -> None:
    """The exponential of a loss, in the dtype of autocast: infinite beyond 11.1."""
    net = TinyGPT()
    with torch.no_grad():
        net.head.weight.mul_(60.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    scaler = grad_scaler(2.0**4)
    handle = watch(net, name="perplexity")
    for number, batch in enumerate(tokens(60), 1):
        optimizer.zero_grad()
        with autocast("fp16"):
            out = net(batch[:, :-1])
            loss = F.cross_entropy(out.flatten(0, 1), batch[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if number % 20 == 0:
            handle.log({"val/perplexity": loss.detach().to(DTYPES["fp16"]).exp()})


@loop(cause="metric_nonfinite", harmful=METRIC, precision="fp32")
def precision_of_no_positive(watch: WatchCall) -> None:
    """True positives divided by predicted positives, which are 0 at every step."""
    net = mlp(8, 32, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    handle = watch(net, name="positives")
    for x, y in draw_labelled(60):
        optimizer.zero_grad()
        out = net(x).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(out, (y == 0).float())
        loss.backward()
        optimizer.step()
        predicted = out.detach() > 5
        found = (predicted & (y == 0)).sum() / predicted.sum()
        handle.log({"train/precision": found.item(), "train/loss": loss.item()})
