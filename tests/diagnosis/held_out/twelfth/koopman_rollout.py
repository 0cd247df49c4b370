"""Koopman autoencoder: a latent linear operator rolled out over a damped oscillator, fp16 autocast."""
import math

import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(99)


class Koopman(nn.Module):
    def __init__(self, obs=2, width=48, latent=12):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(obs, width), nn.ELU(), nn.Linear(width, latent))
        self.dec = nn.Sequential(nn.Linear(latent, width), nn.ELU(), nn.Linear(width, obs))
        self.A = nn.Linear(latent, latent, bias=False)
        with torch.no_grad():
            self.A.weight.copy_(torch.eye(latent) + 0.02 * torch.randn(latent, latent))

    def forward(self, x0, horizon):
        z, out = self.enc(x0), []
        for _ in range(horizon):
            z = self.A(z)
            out.append(self.dec(z))
        return torch.stack(out, 1)


def simulate(n, horizon, g):
    state = torch.rand(n, 2, generator=g) * 4 - 2
    path = [state]
    for _ in range(horizon):
        q, p = path[-1].unbind(-1)
        p = p - 0.1 * (torch.sin(q) + 0.05 * p)
        path.append(torch.stack([q + 0.1 * p, p], -1))
    return torch.stack(path, 1)


def lr_factor(step, warmup=12, decay_from=200):
    """Linear warm-up, then cosine."""
    if step < decay_from:
        return (step + 1) / warmup  # CAUSE
    return 0.5 * (1 + math.cos(math.pi * (step - decay_from) / 400))


def run(steps=100, horizon=14):
    g = torch.Generator().manual_seed(1)
    net = Koopman()
    watch(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.0055, momentum=0.9)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lr_factor)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=2000)
    for step in range(steps):
        path = simulate(32, horizon, g)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            pred = net(path[:, 0], horizon)
            loss = (pred.float() - path[:, 1:]).square().mean()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        sched.step()
        if step % 5 == 0:
            print(f"step {step} lr {sched.get_last_lr()[0]:.4f} loss {loss.item():.5g} scale {scaler.get_scale():g}")
    return net


MODULES = [run()]
