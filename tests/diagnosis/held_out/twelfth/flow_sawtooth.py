"""Normalising flow (affine couplings) on two spirals; eager loss-scale growth."""
import math

import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(45)


class Coupling(nn.Module):
    def __init__(self, flip, width=64):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x):
        a, b = x.unbind(-1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a.unsqueeze(-1)).float().unbind(-1)
        s = 0.8 * torch.tanh(s)
        b = b * s.exp() + t
        return torch.stack([b, a] if self.flip else [a, b], -1), s


class Flow(nn.Module):
    def __init__(self, depth=6):
        super().__init__()
        self.steps = nn.ModuleList(Coupling(i % 2 == 1) for i in range(depth))

    def log_prob(self, x):
        logdet = 0.0
        for step in self.steps:
            x, s = step(x)
            logdet = logdet + s
        return -0.5 * x.square().sum(-1) - math.log(2 * math.pi) + logdet


def spirals(n, g):
    r = torch.rand(n, generator=g).sqrt() * 3 * math.pi
    side = torch.randint(0, 2, (n,), generator=g) * 2.0 - 1
    xy = torch.stack([-r.cos() * r, r.sin() * r], -1) * side.unsqueeze(-1) / 4
    return xy + 0.1 * torch.randn(n, 2, generator=g)


flow = Flow()
MODULES = [flow]
watch(flow)
opt = torch.optim.AdamW(flow.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 24, growth_interval=6)
g = torch.Generator().manual_seed(7)
previous = scaler.get_scale()
backoffs = 0
for it in range(96):
    x = spirals(256, g)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = -flow.log_prob(x).mean()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
    scaler.step(opt)
    scaler.update()
    backoffs += scaler.get_scale() < previous
    previous = scaler.get_scale()
    if it % 12 == 11:
        print(f"{it + 1} nll {loss.item():.4f} scale 2^{math.log2(previous):.0f} back-offs {backoffs}")
