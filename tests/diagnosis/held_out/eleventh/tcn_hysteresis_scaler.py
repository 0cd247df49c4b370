"""Temporal convolutions on a noisy series; Lion, and a loss scaler with hysteresis written by hand."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(33)


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(b1 * m + (1 - b1) * p.grad), alpha=-group["lr"])
                m.lerp_(p.grad, 1 - b2)


class LossScale:
    """Grows every `window` good steps; shrinks only once `hysteresis` overflows have come."""

    def __init__(self, init=2.0 ** 24, factor=2.0, window=15, hysteresis=2, floor=1.0):
        self.value, self.factor, self.window, self.floor = init, factor, window, floor
        self.hysteresis, self.credit, self.good, self.skipped = hysteresis, 1, 0, 0

    def overflow(self):
        self.good, self.skipped = 0, self.skipped + 1
        self.credit -= 1
        if self.credit <= 0:
            self.value = max(self.value / self.factor, self.floor)

    def success(self):
        self.good += 1
        if self.good % self.window == 0:
            self.credit = self.hysteresis
            self.value *= self.factor


class CausalBlock(nn.Module):
    def __init__(self, c, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.Conv1d(c, c, 3, dilation=dilation)
        self.mix = nn.Conv1d(c, c, 1)

    def forward(self, x):
        return x + self.mix(F.gelu(self.conv(F.pad(x, (self.pad, 0)))))


def build(c=24):
    return nn.Sequential(nn.Conv1d(1, c, 1), *[CausalBlock(c, 2 ** i) for i in range(4)], nn.Conv1d(c, 1, 1))


def windows(n, length, generator):
    t = torch.arange(length + 1)
    f = 0.02 + 0.08 * torch.rand(n, 2, 1, generator=generator)
    phase = 6.28 * torch.rand(n, 2, 1, generator=generator)
    series = torch.sin(6.28 * f * t + phase).sum(1) + 0.05 * torch.randn(n, length + 1, generator=generator)
    return series[:, None, :-1], series[:, None, 1:]


def train(steps=100):
    net = build()
    watch(net)
    optimizer, scale = Lion(net.parameters(), lr=6e-4), LossScale()
    generator = torch.Generator().manual_seed(90)
    for step in range(steps):
        x, y = windows(8, 48, generator)
        with torch.autocast("cpu", dtype=torch.float16):
            forecast = net(x)
        loss = F.huber_loss(forecast.float()[..., 16:], y[..., 16:], delta=0.5)
        (loss * scale.value).backward()
        grads = [p.grad for p in net.parameters()]
        if all(g.isfinite().all() for g in grads):
            torch._foreach_div_(grads, scale.value)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            scale.success()
        else:
            scale.overflow()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 9:
            print(f"{step + 1:3d} loss {loss.item():.4f} scale 2^{torch.tensor(scale.value).log2():.0f} skipped {scale.skipped}")


train()
