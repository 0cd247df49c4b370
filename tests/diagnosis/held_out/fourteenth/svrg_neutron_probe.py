"""Soil moisture from cosmic-ray neutron counts, variance-reduced SGD on a small data set."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(21)
g = torch.Generator().manual_seed(12)

N, BATCH, INNER, OUTER = 384, 32, 32, 3
x = torch.randn(N, 10, generator=g)
beta = torch.randn(10, generator=g)
y = torch.tanh(x @ beta / 3) + 0.3 * x[:, 0] * x[:, 1] + 0.05 * torch.randn(N, generator=g)

net = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
watch(net)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 6, growth_interval=8)


def batch_loss(model, rows):
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x[rows]).squeeze(-1)
    return F.mse_loss(out.float(), y[rows])


class SVRG:
    """g = grad f_i(w) - grad f_i(w_snap) + mu, then momentum-free SGD."""

    def __init__(self, model, lr):
        self.model, self.snap = model, copy.deepcopy(model)
        self.opt = torch.optim.SGD(model.parameters(), lr=lr)
        self.mu = None

    def take_snapshot(self):
        self.snap.load_state_dict(self.model.state_dict())
        self.snap.zero_grad(set_to_none=True)
        chunks = torch.arange(N).split(BATCH)
        for rows in chunks:
            scaler.scale(batch_loss(self.snap, rows) / len(chunks)).backward()
        self.mu = [p.grad.clone() for p in self.snap.parameters()]  # CAUSE

    def correct(self, rows):
        self.snap.zero_grad(set_to_none=True)
        scaler.scale(batch_loss(self.snap, rows)).backward()
        with torch.no_grad():
            for p, q, m in zip(self.model.parameters(), self.snap.parameters(), self.mu):
                p.grad.add_(m - q.grad)

    def step(self, rows):
        self.opt.zero_grad(set_to_none=True)
        loss = batch_loss(self.model, rows)
        scaler.scale(loss).backward()
        self.correct(rows)
        scaler.step(self.opt)
        scaler.update()
        return loss.item()


trainer = SVRG(net, lr=0.2)
step = 0
for outer in range(OUTER):
    trainer.take_snapshot()
    losses = []
    for _ in range(INNER):
        losses.append(trainer.step(torch.randint(0, N, (BATCH,), generator=g)))
        step += 1
    with torch.no_grad():
        full = batch_loss(net, torch.arange(N)).item()
    print(f"outer {outer} step {step} inner {sum(losses) / INNER:.4f} full {full:.4f} scale {scaler.get_scale():g}")
