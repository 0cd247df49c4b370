"""Next-touch prediction for a drawing app: a mixture of Gaussians over the pen offset."""
import math
from dataclasses import dataclass

import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

@dataclass
class Cfg:
    hidden: int = 56
    comps: int = 5
    steps: int = 80
    batch: int = 48
    history: int = 6
    lr: float = 2e-3

class MixtureHead(nn.Module):
    def __init__(self, dim, comps):
        super().__init__()
        self.logit = nn.Linear(dim, comps)
        self.loc = nn.Linear(dim, comps * 2)
        self.log_scale = nn.Linear(dim, comps * 2)

    def forward(self, h):
        k = self.logit.out_features
        pi = torch.softmax(self.logit(h), -1)
        mu = self.loc(h).unflatten(-1, (k, 2))
        sigma = torch.exp(self.log_scale(h).clamp(-2.0, 2.0)).unflatten(-1, (k, 2))
        return pi, mu, sigma

class PenModel(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.inp = nn.Linear(2 * cfg.history, cfg.hidden)
        self.res = nn.ModuleList(nn.Linear(cfg.hidden, cfg.hidden) for _ in range(2))
        self.head = MixtureHead(cfg.hidden, cfg.comps)

    def forward(self, past):
        h = torch.tanh(self.inp(past.flatten(1)))
        for lin in self.res:
            h = h + torch.tanh(lin(h))
        return self.head(h)

    def nll(self, past, nxt):
        pi, mu, sigma = self(past)
        z = (nxt.unsqueeze(1).to(mu.dtype) - mu) / sigma
        density = torch.exp(-0.5 * z.square().sum(-1)) / (2 * math.pi * sigma.prod(-1))  # CAUSE
        return -(pi * density).sum(-1).log().mean()

class Strokes:
    def __init__(self, cfg):
        self.cfg, self.g = cfg, torch.Generator().manual_seed(66)

    def draw(self, step):
        n, t = self.cfg.batch, self.cfg.history + 1
        turn = (torch.rand(n, 1, generator=self.g) - 0.5) * 1.2
        start = torch.rand(n, 1, generator=self.g) * 2 * math.pi
        ang = start + turn * torch.arange(t)
        off = torch.stack([ang.cos(), ang.sin()], -1) + 0.15 * torch.randn(n, t, 2, generator=self.g)
        if step > 30 and step % 8 == 3:
            off[0, -1] *= 5.5 / off[0, -1].norm()      # pen lifted and put down elsewhere
        return off[:, :-1], off[:, -1]

cfg = Cfg()
torch.set_num_threads(1)
torch.manual_seed(12)
model, strokes = PenModel(cfg), Strokes(cfg)
MODULES = [model]
optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr, betas=(0.9, 0.98))
scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=1000)
watch(*MODULES)

ema = None
for step in range(1, cfg.steps + 1):
    past, nxt = strokes.draw(step)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model.nll(past, nxt)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 2.0)
    scaler.step(optimizer)
    scaler.update()
    if torch.isfinite(loss):
        ema = loss.item() if ema is None else 0.9 * ema + 0.1 * loss.item()
    if step % 20 == 0:
        print(f"step {step} nll(ema) {ema:.3f} scale {scaler.get_scale():.0f}")
