"""Vibration classifier carried from a test bench to machines in service by a gradient reversal layer (DANN).
The reversal is off for the first epochs and then ramps up, so the domain loss rises while training goes well."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(64)

LENGTH, FAULTS = 64, 4


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.strength * grad, None


def signals(gen, size, machine):
    fault = torch.randint(FAULTS, (size,), generator=gen)
    t = torch.arange(LENGTH) / LENGTH
    speed = 5 + torch.rand(size, 1, generator=gen)
    tone = torch.sin(2 * math.pi * speed * (1 + fault[:, None]) * t)
    if machine:
        tone = 0.7 * tone + 0.9 * torch.sin(2 * math.pi * 13 * t + 6 * torch.rand(size, 1, generator=gen)) + 0.3
    return (tone + 0.3 * torch.randn(size, LENGTH, generator=gen))[:, None], fault


class Features(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.a, self.b = nn.Conv1d(1, width, 9, padding=4), nn.Conv1d(width, width, 9, stride=2, padding=4)

    def forward(self, x):
        h = F.leaky_relu(self.b(F.leaky_relu(self.a(x), 0.1)), 0.1)
        return torch.cat([h.mean(2), h.square().mean(2).add(1e-3).sqrt()], 1)


class DANN(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.features = Features(width)
        self.fault = nn.Linear(2 * width, FAULTS)
        self.domain = nn.Sequential(nn.Linear(2 * width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x, strength):
        f = self.features(x)
        return self.fault(f), self.domain(Reverse.apply(f, strength)).squeeze(1)


def strength_at(step, start=25, full=75, peak=0.4):
    return 0.0 if step < start else peak * min(1.0, (step - start) / (full - start))


gen = torch.Generator().manual_seed(44)
net = DANN()
watch(net)
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14, growth_interval=20)

for step in range(95):
    bench, fault = signals(gen, 24, machine=False)
    field, truth = signals(gen, 24, machine=True)
    side = torch.cat([torch.zeros(24), torch.ones(24)])
    with torch.autocast("cpu", dtype=torch.float16):
        fault_logits, domain_logits = net(torch.cat([bench, field]), strength_at(step))
    task = F.cross_entropy(fault_logits[:24].float(), fault)
    domain = F.binary_cross_entropy_with_logits(domain_logits.float(), side)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(task + domain).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 8 == 0:
        hit = (fault_logits[24:].argmax(1) == truth).float().mean()
        print(f"{step:3d} task {task.item():.3f} domain {domain.item():.3f} in service {hit:.2f} scale {scaler.get_scale():g}")
