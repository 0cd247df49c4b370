"""Preference tuning of a velocity field. A KL-like anchor keeps it near the pretrained field; to save memory the
reference is not a second network: its weights are swapped in for one forward pass."""
import contextlib

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(14)


class Velocity(nn.Module):
    def __init__(self, dim=6, width=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(),
                                 nn.Linear(width, dim))

    def forward(self, x, t):
        return self.net(torch.cat([x, t], 1))


class WeightSwap:
    """Keeps one extra set of weights and exchanges it with the live one on request."""

    def __init__(self, module):
        self.module = module
        self.stored = [p.detach().clone() for p in module.parameters()]

    def _exchange(self):
        for i, p in enumerate(self.module.parameters()):
            p.data, self.stored[i] = self.stored[i], p.data

    @contextlib.contextmanager
    def active(self):
        self._exchange()
        try:
            yield self.module
        finally:
            self._exchange()


def pretrain(field, gen, steps=40):
    opt = torch.optim.Adam(field.parameters(), lr=3e-3)
    for _ in range(steps):
        x1 = torch.randn(64, 6, generator=gen) * 0.5 + 1.0
        x0, t = torch.randn(64, 6, generator=gen), torch.rand(64, 1, generator=gen)
        loss = F.mse_loss(field((1 - t) * x0 + t * x1, t), x1 - x0)
        opt.zero_grad()
        loss.backward()
        opt.step()


gen = torch.Generator().manual_seed(31)
field = Velocity()
pretrain(field, gen)
reference = WeightSwap(field)
watch(field)
optimizer = torch.optim.AdamW(field.parameters(), lr=1e-3)
BETA, STEPS = 4.0, 80
direction = F.normalize(torch.randn(6, generator=gen), dim=0)


def objective(x, t):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        v = field(x, t)
        with reference.active(), torch.no_grad():
            v_ref = field(x, t)  # CAUSE
        end = x + (1 - t) * v
        reward = (end * direction).sum(1).mean()
        anchor = (v.float() - v_ref.float()).square().sum(1).mean()
        return -reward + BETA * anchor, reward, anchor


for step in range(STEPS):
    t = torch.rand(48, 1, generator=gen)
    x = (1 - t) * torch.randn(48, 6, generator=gen) + t * (torch.randn(48, 6, generator=gen) * 0.5 + 1.0)
    loss, reward, anchor = objective(x, t)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(field.parameters(), 5.0)
    optimizer.step()
    if step % 10 == 9:
        print(f"{step:3d} reward {reward.item():.3f} anchor {anchor.item():.4f}")

with torch.no_grad():
    drift = sum((p - q).square().sum() for p, q in zip(field.parameters(), reference.stored)).sqrt()
print(f"distance from the pretrained weights {drift:.3f}")
