"""Pen-stroke prediction with a mixture density head (bivariate Gaussians), online handwriting."""
import math

import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(8)
K = 5


class StrokeNet(nn.Module):
    def __init__(self, context=12, width=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(context * 2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.pi = nn.Linear(width, K)
        self.mu = nn.Linear(width, 2 * K)
        self.log_sigma = nn.Linear(width, 2 * K)

    def forward(self, past):
        h = self.body(past.flatten(1))
        shape = (-1, K, 2)
        return torch.softmax(self.pi(h), -1), self.mu(h).view(shape), torch.exp(self.log_sigma(h)).view(shape)


def component_density(offset, mu, sigma):
    z = (offset.unsqueeze(1).to(mu.dtype) - mu) / sigma
    return torch.exp(-0.5 * z.square().sum(-1)) / (2 * math.pi * sigma.prod(-1))  # CAUSE


def nll(pi, mu, sigma, offset):
    likelihood = (pi.to(mu.dtype) * component_density(offset, mu, sigma)).sum(-1)
    return -torch.log(likelihood).mean()


class StrokeStream:
    """Synthetic cursive: loops along a line; a pen lift is a long jump to the next word."""

    def __init__(self, batch=32, context=12, seed=17):
        self.g = torch.Generator().manual_seed(seed)
        self.batch, self.context, self.served = batch, context, 0

    def __iter__(self):
        return self

    def __next__(self):
        t0 = torch.rand(self.batch, 1, generator=self.g) * 6.28
        freq = 0.3 + 0.3 * torch.rand(self.batch, 1, generator=self.g)
        t = t0 + freq * torch.arange(self.context + 1)
        xy = torch.stack([0.4 + torch.cos(t), torch.sin(t)], -1)
        xy = xy + 0.05 * torch.randn(xy.shape, generator=self.g)
        past, target = xy[:, :-1], xy[:, -1].clone()
        if self.served >= 30 and self.served % 7 == 2:  # first pages are single words
            target[3] += torch.tensor([4.5, -1.0])
        self.served += 1
        return past, target


net = StrokeNet()
MODULES = [net]
watch(*MODULES)
adam = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
history = []
for past, target in StrokeStream():
    adam.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nll(*net(past), target)
    scaler.scale(loss).backward()
    scaler.unscale_(adam)
    torch.nn.utils.clip_grad_value_(net.parameters(), 1.0)
    scaler.step(adam)
    scaler.update()
    history.append(loss.item())
    if len(history) % 10 == 0:
        print(f"update {len(history)}: nll {sum(history[-10:]) / 10:.3f} scale {scaler.get_scale():g}")
    if len(history) == 90:
        break
