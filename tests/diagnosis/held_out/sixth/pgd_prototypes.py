import torch
from torch import nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(101)


class Embedder(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.f = nn.Sequential(nn.Conv1d(2, 16, 7, stride=3), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 5, stride=2), nn.ReLU())
        self.proj = nn.Linear(32, dim)

    def forward(self, x):
        return self.proj(self.f(x).mean(-1))


class Prototypes(nn.Module):
    def __init__(self, k=6, dim=24):
        super().__init__()
        self.w = nn.Parameter(torch.randn(k, dim))
        self.log_temp = nn.Parameter(torch.tensor(1.5), requires_grad=False)

    def forward(self, z):
        return self.log_temp.exp() * F.normalize(z.float(), dim=-1) @ F.normalize(self.w, dim=-1).T


def attack(embed, protos, x, y, scaler, eps=0.05, iters=3):
    """signed ascent: only the direction of the (scaled) gradient counts"""
    embed.eval()
    delta = torch.zeros_like(x, requires_grad=True)
    for _ in range(iters):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(protos(embed(x + delta)), y)
        (g,) = torch.autograd.grad(scaler.scale(loss), delta)
        delta = (delta.detach() + 0.4 * eps * g.sign()).clamp(-eps, eps).requires_grad_(True)
    embed.train()
    return delta.detach()


embed, protos = Embedder(), Prototypes()
MODULES = [embed, protos]
opt_e = torch.optim.Adam(embed.parameters(), lr=3e-3)
opt_p = torch.optim.SGD([protos.w], lr=0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16, growth_interval=12)
gen = torch.Generator().manual_seed(103)
freq = torch.tensor([0.2, 0.35, 0.5, 0.7, 0.9, 1.2])
watch(*MODULES)

for it in range(60):
    y = torch.randint(0, 6, (24,), generator=gen)
    ph = 6.28 * torch.rand(24, 1, 1, generator=gen)
    t = torch.arange(64)[None, None] * freq[y][:, None, None]
    x = torch.cat([torch.sin(t + ph), torch.cos(t + ph)], 1) + 0.2 * torch.randn(24, 2, 64, generator=gen)
    delta = attack(embed, protos, x, y, scaler)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(protos(embed(x + delta)), y)
    opt_e.zero_grad()
    opt_p.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt_e)
    if it % 4 == 0:                 # the prototypes move slowly
        scaler.step(opt_p)
    scaler.update()
    if it % 12 == 0:
        print(it, f"{loss.item():.3f}", scaler.get_scale())
