"""Blind source separation with a learned whitening front end; log-cosh contrast on the sources."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

import math

torch.set_num_threads(1)
torch.manual_seed(30)
gen = torch.Generator().manual_seed(301)
CH, SRC = 16, 16
MIXING = torch.linalg.qr(torch.randn(CH, SRC, generator=gen))[0] * (0.5 + torch.rand(SRC, generator=gen))


def segment(index, n=256):
    s = torch.distributions.Laplace(0.0, 0.7).icdf(torch.rand(n, SRC, generator=gen).clamp(1e-4, 1 - 1e-4))
    if index in (26, 51, 52, 68):
        blink = torch.exp(-((torch.arange(n) - 120.0) / 14) ** 2)
        s[:, 2] += 15.0 * blink
    return s @ MIXING.t()


class Unmixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.shrink = nn.Parameter(torch.zeros(CH))
        self.unmix = nn.Linear(CH, SRC, bias=False)
        nn.init.orthogonal_(self.unmix.weight)

    def forward(self, x):
        return self.unmix(x * torch.exp(self.shrink))

    def log_volume(self):
        return torch.linalg.slogdet(self.unmix.weight)[1] + self.shrink.sum()


def contrast(s):
    return torch.log(torch.cosh(s))  # CAUSE


model = Unmixer()
MODULES = [model]
watch(*MODULES)
params = [{"params": [model.unmix.weight], "lr": 0.02}, {"params": [model.shrink], "lr": 0.005}]
opt = torch.optim.Adam(params)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=500)
smooth = None
for it in range(1, 81):
    x = segment(it)
    with torch.autocast("cpu", dtype=torch.float16):
        sources = model(x)
        nll = 1.6 * contrast(sources).sum(1).float().mean()
    loss = nll - model.log_volume()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if math.isfinite(loss.item()):
        smooth = loss.item() if smooth is None else 0.9 * smooth + 0.1 * loss.item()
    if it % 20 == 0:
        cross = (model.unmix.weight * model.shrink.exp()) @ MIXING
        peak = cross.abs().amax(1) / cross.abs().sum(1)
        print(f"{it} nll {smooth:.4f} purity {peak.mean().item():.3f} scale {scaler.get_scale():.0f}")
