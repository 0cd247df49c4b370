"""Energy-based model for 8x8 stroke patches, trained with short-run Langevin chains and a replay buffer."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


torch.set_num_threads(1)
torch.manual_seed(5)
gen = torch.Generator().manual_seed(17)


def strokes(n):
    rows = torch.randint(1, 7, (n,), generator=gen)
    vertical = torch.rand(n, generator=gen) < 0.5
    img = torch.full((n, 8, 8), -0.6)
    for i, r in enumerate(rows.tolist()):
        if vertical[i]:
            img[i, :, r] = 0.6
        else:
            img[i, r, :] = 0.6
    return (img + 0.05 * torch.randn(n, 8, 8, generator=gen)).view(n, 64)


class Energy(nn.Module):
    def __init__(self, dim=64, width=96):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(dim, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        return self.out(self.body(x)).squeeze(-1)


class ContrastiveDivergence:
    def __init__(self, net, chains=256, steps=8, alpha=1.0, sigma=0.02):
        self.net, self.steps, self.alpha, self.sigma = net, steps, alpha, sigma
        self.replay = torch.rand(chains, 64, generator=gen) * 2 - 1
        self.opt = torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.99))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def energy(self, x):
        with torch.autocast("cpu", dtype=torch.float16):
            return self.net(x).float()

    def walk(self, x):
        for _ in range(self.steps):
            x = x.detach().requires_grad_(True)
            g, = torch.autograd.grad(self.scaler.scale(self.energy(x).sum()), x)  # CAUSE
            noise = self.sigma * torch.randn(x.shape, generator=gen)
            x = (x.detach() - self.alpha * g + noise).clamp(-1, 1)  # CAUSE
        return x.detach()

    def step(self, pos):
        idx = torch.randperm(len(self.replay), generator=gen)[: len(pos)]
        neg = self.walk(self.replay[idx])
        self.replay[idx] = neg
        fresh = idx[: len(idx) // 20]
        self.replay[fresh] = torch.rand(len(fresh), 64, generator=gen) * 2 - 1
        e_pos, e_neg = self.energy(pos), self.energy(neg)
        loss = e_pos.mean() - e_neg.mean() + 0.05 * (e_pos.pow(2).mean() + e_neg.pow(2).mean())
        self.opt.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item(), (neg.abs() > 0.99).float().mean().item(), e_pos.mean().item() - e_neg.mean().item()


net = Energy()
MODULES = [net]
watch(*MODULES)
trainer = ContrastiveDivergence(net)
for it in range(100):
    loss, corner, gap = trainer.step(strokes(64))
    if it % 20 == 19:
        print(f"it {it + 1} loss {loss:.4f} saturated pixels {corner:.3f} gap {gap:.3f}")
