"""Preference tuning of a flow-matching model (DPO); the reference is the same network with other weights swapped in."""
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(141)


class VelocityNet(nn.Module):
    def __init__(self, dim=8, d=64):
        super().__init__()
        self.inp, self.time = nn.Linear(dim, d), nn.Linear(16, d)
        self.mid1, self.mid2, self.out = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, dim)

    def forward(self, x, t):
        f = t[:, None] * torch.arange(1, 9) * 3.14159
        h = F.silu(self.inp(x) + self.time(torch.cat([f.sin(), f.cos()], 1)))
        h = h + F.silu(self.mid1(h))
        h = h + F.silu(self.mid2(h))
        return self.out(h)


class DPOTrainer:
    def __init__(self, model, beta=4.0, lr=1e-3):
        self.model, self.beta = model, beta
        self.ref = [p.detach().clone() for p in model.parameters()]
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
        self.gen = torch.Generator().manual_seed(142)

    def autocast(self):
        return torch.autocast("cpu", dtype=torch.bfloat16)

    @contextmanager
    def use_ref_parameters(self):
        saved = [p.detach().clone() for p in self.model.parameters()]
        with torch.no_grad():
            for p, r in zip(self.model.parameters(), self.ref):
                p.data.copy_(r)
        yield
        with torch.no_grad():
            for p, s in zip(self.model.parameters(), saved):
                p.data.copy_(s)

    def pairs(self, n=32):
        """Preferred are points on the unit sphere, the others are stretched along the first axis."""
        chosen = F.normalize(torch.randn(n, 8, generator=self.gen), dim=1)
        rejected = F.normalize(torch.randn(n, 8, generator=self.gen), dim=1)
        rejected[:, 0] *= 3
        return chosen, rejected

    def flow_loss(self, x0, noise, t):
        xt = (1 - t[:, None]) * x0 + t[:, None] * noise
        return (self.model(xt, t).float() - (noise - x0)).pow(2).mean(1)

    def optimize(self, batches):
        with self.autocast():  # CAUSE
            for step in batches:
                chosen, rejected = self.pairs()
                noise, t = torch.randn(32, 8, generator=self.gen), torch.rand(32, generator=self.gen)
                policy = self.flow_loss(chosen, noise, t) - self.flow_loss(rejected, noise, t)
                with torch.no_grad(), self.use_ref_parameters():
                    reference = self.flow_loss(chosen, noise, t) - self.flow_loss(rejected, noise, t)
                margin = -self.beta * (policy - reference)
                loss = -F.logsigmoid(margin).mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                if step % 10 == 0:
                    print(f"step {step} loss {loss.item():.4f} margin {margin.mean().item():.4f} accuracy {(margin > 0).float().mean().item():.2f}")


def pretrain(model, steps=40):
    """Float32, on both kinds of points: stands for the released checkpoint."""
    gen, optimizer = torch.Generator().manual_seed(143), torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        x0 = F.normalize(torch.randn(64, 8, generator=gen), dim=1)
        x0[::2, 0] *= 3
        noise, t = torch.randn(64, 8, generator=gen), torch.rand(64, generator=gen)
        xt = (1 - t[:, None]) * x0 + t[:, None] * noise
        optimizer.zero_grad()
        F.mse_loss(model(xt, t), noise - x0).backward()
        optimizer.step()


model = VelocityNet()
pretrain(model)
watch(model)
trainer = DPOTrainer(model)
for epoch in range(2):
    trainer.optimize(range(30 * epoch, 30 * epoch + 30))
