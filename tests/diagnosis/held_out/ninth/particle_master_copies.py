"""Half-precision charge regressor with fp32 master copies and a dynamic scale written by hand."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class DeepSet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.rho = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, hits):
        return self.rho(self.phi(hits).mean(1)).squeeze(-1)


class MasterCopies:
    """Apex-like: half weights do the work, fp32 twins take the updates."""

    def __init__(self, module, optimizer_cls, scale=2.0 ** 17, patience=25, **kw):
        self.half_params = list(module.parameters())
        self.master = [p.detach().float().clone().requires_grad_() for p in self.half_params]
        self.opt = optimizer_cls(self.master, **kw)
        self.scale, self.patience, self.good, self.skipped = scale, patience, 0, 0

    def backward(self, loss):
        for p in self.half_params:
            p.grad = None
        (loss * self.scale).backward()

    def step(self):
        flat = [p.grad.detach().float() / self.scale for p in self.half_params]
        if not all(bool(g.isfinite().all()) for g in flat):
            self.scale, self.good, self.skipped = self.scale / 2, 0, self.skipped + 1
            return False
        for m, g in zip(self.master, flat):
            m.grad = g
        torch.nn.utils.clip_grad_norm_(self.master, 1.0)
        self.opt.step()
        with torch.no_grad():
            for p, m in zip(self.half_params, self.master):
                p.copy_(m)
        self.good += 1
        if self.good % self.patience == 0:
            self.scale *= 2
        return True


def events(gen, n=64, k=20):
    hits = torch.randn(n, k, 6, generator=gen)
    charge = (hits[..., 0] * hits[..., 1].sign()).mean(1) * 3 + hits[..., 2].abs().mean(1)
    return hits, charge


torch.set_num_threads(1)
torch.manual_seed(8)
net = DeepSet().half()
MODULES = [net]
trainer = MasterCopies(net, torch.optim.Adam, lr=2e-3)
gen = torch.Generator().manual_seed(71)
watch(*MODULES)

for step in range(1, 111):
    hits, charge = events(gen)
    out = net(hits.half())
    loss = F.mse_loss(out.float(), charge)
    trainer.backward(loss)
    trainer.step()
    if step % 10 == 0:
        print(step, f"mse {loss.item():.4f} scale {trainer.scale:g} skipped {trainer.skipped}")
