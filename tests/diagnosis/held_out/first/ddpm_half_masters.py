"""DDPM on 1-d signals: half weights, fp32 master copies, a hand-written dynamic loss scaler (OpenAI guided-diffusion style)."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class Residual(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n, self.c1, self.emb = nn.GroupNorm(4, c), nn.Conv1d(c, c, 3, padding=1), nn.Linear(16, c)

    def forward(self, x, e):
        h = F.silu(F.group_norm(x.float(), 4, self.n.weight.float(), self.n.bias.float()).to(x.dtype))
        return x + self.c1(h + self.emb(e)[..., None])


class EpsNet(nn.Module):
    def __init__(self, c=32):
        super().__init__()
        self.inp, self.out = nn.Conv1d(1, c, 3, padding=1), nn.Conv1d(c, 1, 3, padding=1)
        self.r1, self.r2 = Residual(c), Residual(c)

    def forward(self, x, t):
        f = torch.exp(-torch.arange(8) * math.log(100.0) / 8)
        e = torch.cat([(t[:, None] * f).sin(), (t[:, None] * f).cos()], -1).to(x.dtype)
        h = self.inp(x)
        return self.out(self.r2(self.r1(h, e), e))


class MixedPrecisionTrainer:
    def __init__(self, model, lr, lg_loss_scale=20.0, growth=0.01):
        self.model, self.lg, self.growth = model, lg_loss_scale, growth
        self.params = list(model.parameters())
        self.master = [nn.Parameter(p.detach().float().clone()) for p in self.params]
        self.opt = torch.optim.AdamW(self.master, lr=lr, weight_decay=0.0)
        self.ema = [m.detach().clone() for m in self.master]

    def backward(self, loss):
        (loss * 2 ** self.lg).backward()

    def optimize(self):
        bad = any(not torch.isfinite(p.grad).all() for p in self.params)
        if bad:
            self.lg -= 1
            self.zero()
            return False
        for m, p in zip(self.master, self.params):
            m.grad = p.grad.float().mul_(2.0 ** -self.lg)
        self.opt.step()
        with torch.no_grad():
            for p, m, e in zip(self.params, self.master, self.ema):
                p.copy_(m)
                e.mul_(0.95).add_(m, alpha=0.05)
        self.lg += self.growth
        self.zero()
        return True

    def zero(self):
        for p in self.params:
            p.grad = None


torch.set_num_threads(1)
torch.manual_seed(91)
T = 50
abar = torch.cumprod(1 - torch.linspace(1e-3, 0.12, T), 0)
model, ema_model = EpsNet().half(), EpsNet()
MODULES = [model, ema_model]
trainer = MixedPrecisionTrainer(model, lr=3e-3)
watch(*MODULES)
gen = torch.Generator().manual_seed(25)
taken = 0
for it in range(1, 91):
    grid = torch.arange(24) / 24.0
    x0 = torch.sin(6.2832 * (grid * (1 + torch.randint(0, 2, (32, 1), generator=gen)) + torch.rand(32, 1, generator=gen)))[:, None]
    t = torch.randint(0, T, (32,), generator=gen)
    a = abar[t].view(-1, 1, 1)
    eps = torch.randn(x0.shape, generator=gen)
    xt = (a.sqrt() * x0 + (1 - a).sqrt() * eps).half()
    loss = F.mse_loss(model(xt, t.float()).float(), eps)
    trainer.backward(loss)
    taken += trainer.optimize()
    if it % 15 == 0:
        print(f"{it} mse {loss.item():.4f} steps taken {taken} lg_loss_scale {trainer.lg:.2f}")
with torch.no_grad():
    for p, e in zip(ema_model.parameters(), trainer.ema):
        p.copy_(e)
