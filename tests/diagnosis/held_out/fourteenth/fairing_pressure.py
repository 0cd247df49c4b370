"""Surrogate for the pressure coefficients at twelve taps of a fairing."""
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(61)
tunnel = torch.Generator().manual_seed(16)

HP = {"lr": 1e-3, "momentum": 0.9, "lr_growth": 1.1, "lr_floor": 1e-4, "batch": 64, "iters": 96}


def tap_readings(n):
    """Geometry and flow parameters of a run -> pressure coefficient at twelve taps."""
    geo = torch.rand(n, 5, generator=tunnel) * 2 - 1
    angle = 0.3 * torch.randn(n, 1, generator=tunnel)
    s = torch.linspace(0, 1, 12)
    cp = 1 - 4 * torch.sin(3.1 * (s + 0.1 * geo[:, :1]) + angle).square() * (1 + 0.3 * geo[:, 1:2])
    cp = cp + 0.4 * geo[:, 2:3] * torch.exp(-((s - 0.6) / (0.1 + 0.05 * geo[:, 3:4])) ** 2)
    return torch.cat([geo, angle], dim=1), cp + 0.02 * torch.randn(n, 12, generator=tunnel)


def build(width=72):
    return nn.Sequential(
        nn.Linear(6, width), nn.LeakyReLU(0.1),
        nn.Linear(width, width), nn.LeakyReLU(0.1),
        nn.Linear(width, width), nn.LeakyReLU(0.1),
        nn.Linear(width, 12),
    )


class Schedule:
    """Sets the rate of every group before each iteration."""

    def __init__(self, optimizer, hp):
        self.optimizer, self.hp = optimizer, hp

    def rate(self, it):
        return max(self.hp["lr_floor"], self.hp["lr"] * self.hp["lr_growth"] ** it)  # CAUSE

    def __call__(self, it):
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(it)


def iterate(net, hp):
    opt = torch.optim.SGD(net.parameters(), lr=hp["lr"], momentum=hp["momentum"], nesterov=True)
    schedule = Schedule(opt, hp)
    for it in range(hp["iters"]):
        schedule(it)
        x, cp = tap_readings(hp["batch"])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            guess = net(x)
        loss = (guess.float() - cp).square().mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        yield it, loss.item(), schedule.rate(it)


if __name__ == "__main__":
    net = build()
    watch(net)
    for it, loss, lr in iterate(net, HP):
        if it % 8 == 7:
            print(f"{it:3d} lr {lr:.2e} loss {loss:.4g}")
