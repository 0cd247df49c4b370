"""Parameters without a gradient, gradients that are all 0, and loops without an optimizer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.diagnosis.parts import DEVICE, ConvNet, GRUNet, autocast, draw_labelled, grad_scaler, mlp
from tests.diagnosis.registry import PRECISION, SCALE, WatchCall, loop

HARMFUL = {*SCALE, *PRECISION, "lower_rate", "eps", "restore", "zero_grad", "unscale", "clip"}


@loop(
    cause="no_gradient",
    harmful=HARMFUL,
    variants=[{"precision": "fp32"}, {"precision": "bf16"}],
)
def graph_cut_by_detach(watch: WatchCall, precision: str = "fp32") -> None:
    """A loss of detached outputs and a term of another network: the optimizer gets nothing."""
    net, other = mlp(), mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    watch(net, name="detach")
    for x, y in draw_labelled(120):
        optimizer.zero_grad()
        with autocast(precision):
            out = net(x).detach() + other(x)
        F.cross_entropy(out.float(), y).backward()
        optimizer.step()


class TwoHeads(nn.Module):
    """A classifier with an auxiliary head that its loss leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 32)
        self.head, self.auxiliary = nn.Linear(32, 4), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.head(hidden), self.auxiliary(hidden)


@loop(
    cause="no_gradient",
    harmful=HARMFUL,
    variants=[
        {"precision": "fp16"},
        {"precision": "fp16", "fused": True},
        {"precision": "bf16"},
        {"precision": "fp32"},
    ],
)
def auxiliary_head(watch: WatchCall, precision: str = "fp16", fused: bool = False) -> None:
    """One head's output is computed, and never enters the loss."""
    net = TwoHeads()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=fused)
    scaler = grad_scaler() if precision == "fp16" else torch.amp.GradScaler(DEVICE, enabled=False)
    watch(net, name="auxiliary")
    for x, y in draw_labelled(160):
        optimizer.zero_grad()
        with autocast(precision):
            out, _ = net(x)
            loss = F.cross_entropy(out, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


class Straight(nn.Module):
    """An encoder with codes computed by numpy, outside of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(8, 32, 6), mlp(6, 32, 8)

    def forward(self, x: Tensor) -> Tensor:
        codes = torch.from_numpy(self.encoder(x).float().round().detach().cpu().numpy())
        return self.decoder(codes.to(x.device))


@loop(cause="no_gradient", harmful=HARMFUL)
def codes_through_numpy(watch: WatchCall) -> None:
    """An autoencoder with rounded codes and two optimizers; the encoder's learns nothing."""
    net = Straight()
    optimizer = torch.optim.Adam(
        [{"params": net.encoder.parameters()}, {"params": net.decoder.parameters(), "lr": 3e-3}]
    )
    scaler = grad_scaler()
    watch(net, name="codes")
    for x, _ in draw_labelled(150):
        optimizer.zero_grad(set_to_none=True)
        with autocast("fp16"):
            loss = F.mse_loss(net(x).float(), x)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@loop(cause="zero_gradients", harmful=HARMFUL, variants=[{"fused": False}, {"fused": True}])
def loss_times_zero(watch: WatchCall, fused: bool = False) -> None:
    """The loss's weight is 0, of a schedule that never rises; the scale grows without end."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=fused)
    scaler = grad_scaler(2.0**10, growth_interval=5)
    watch(net, name="times zero")
    for step, (x, y) in enumerate(draw_labelled(120)):
        optimizer.zero_grad()
        weight = min(1.0, step // 1000)
        with autocast("fp16"):
            loss = weight * F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(
    cause="zero_gradients",
    harmful=HARMFUL,
    variants=[{"precision": "fp16"}, {"precision": "bf16"}, {"precision": "fp32"}],
)
def softmax_of_one_class(watch: WatchCall, precision: str = "fp16") -> None:
    """Cross-entropy over one output is 0 whatever the weights are."""
    net = mlp(8, 32, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(
        DEVICE, init_scale=2.0**10, growth_interval=4, enabled=precision == "fp16"
    )
    watch(net, name="one class")
    for x, _ in draw_labelled(140):
        optimizer.zero_grad()
        with autocast(precision):
            loss = F.cross_entropy(net(x), torch.zeros(32, dtype=torch.long))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause="zero_gradients", harmful=HARMFUL)
def dead_units(watch: WatchCall) -> None:
    """Biases of -50 before ReLU: nothing passes, neither forward nor back, but the last bias."""
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4, bias=False))
    with torch.no_grad():
        net[0].bias.fill_(-50.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scaler = grad_scaler(2.0**10, growth_interval=5)
    watch(net, name="dead")
    for x, y in draw_labelled(120):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@loop(cause="zero_gradients", harmful=HARMFUL)
def adapter_of_two_zeros(watch: WatchCall) -> None:
    """A low-rank adapter with both factors initialized to 0: each gradient is multiplied by the
    other.
    """
    base = mlp().requires_grad_(False)
    down, up = nn.Linear(8, 2, bias=False), nn.Linear(2, 4, bias=False)
    nn.init.zeros_(down.weight)
    nn.init.zeros_(up.weight)
    net = nn.ModuleDict({"base": base, "down": down, "up": up})
    optimizer = torch.optim.AdamW([down.weight, up.weight], lr=1e-3, weight_decay=0.0)
    scaler = grad_scaler(2.0**10, growth_interval=5)
    watch(net, name="zeros")
    for x, y in draw_labelled(120):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(base(x) + up(down(x)), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(
    cause="no_optimizer_step",
    harmful=HARMFUL,
    variants=[{"precision": "fp32"}, {"precision": "bf16"}],
)
def descent_by_hand(watch: WatchCall, precision: str = "fp32") -> None:
    """Weights minus rate times gradient, under no_grad: there is no optimizer."""
    net = mlp()
    watch(net, name="by hand")
    for x, y in draw_labelled(60):
        with autocast(precision):
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad
        net.zero_grad()


@loop(cause="no_optimizer_step", harmful=HARMFUL, precision="fp32")
def momentum_by_foreach(watch: WatchCall) -> None:
    """A hand-written momentum with torch._foreach functions on gradients of autograd.grad."""
    net = GRUNet()
    parameters = list(net.parameters())
    velocity = [torch.zeros_like(p) for p in parameters]
    watch(net, name="foreach")
    for x, y in draw_labelled(60, (5, 4)):
        gradients = torch.autograd.grad(F.cross_entropy(net(x), y), parameters)
        torch._foreach_mul_(velocity, 0.9)
        torch._foreach_add_(velocity, gradients)
        with torch.no_grad():
            torch._foreach_add_(parameters, velocity, alpha=-0.01)


@loop(cause="no_optimizer_step", harmful=HARMFUL - {"unscale"})
def scaled_and_by_hand(watch: WatchCall) -> None:
    """A static loss scale and an update by hand, as before torch had a scaler."""
    net = ConvNet()
    watch(net, name="static")
    for x, y in draw_labelled(60, (1, 8, 8)):
        for parameter in net.parameters():
            parameter.grad = None
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        (loss * 1024).backward()
        for parameter in net.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.05 / 1024)
