import copy
import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(51)
TIMESTEPS = 50
betas = torch.linspace(1e-3, 0.12, TIMESTEPS)
abar = torch.cumprod(1 - betas, 0)


class Denoiser(nn.Module):
    def __init__(self, dim=2, width=96):
        super().__init__()
        self.temb = nn.Embedding(TIMESTEPS, width)
        self.inp = nn.Linear(dim, width)
        self.mid = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.out = nn.Linear(width, dim)

    def forward(self, x, t):
        h = self.inp(x) + self.temb(t)
        for layer in self.mid:
            h = h + nn.functional.silu(layer(h))
        return self.out(h)


class EMA:
    def __init__(self, online, decay):
        self.decay = decay
        self.shadow = copy.deepcopy(online).to(torch.bfloat16).requires_grad_(False).eval()

    @torch.no_grad()
    def update(self, online):
        for s, p in zip(self.shadow.parameters(), online.parameters()):
            s.add_((p.to(s.dtype) - s) * (1.0 - self.decay))  # CAUSE


def moons(g, n):
    a = torch.rand(n, generator=g) * torch.pi
    up = torch.rand(n, generator=g) < 0.5
    x = torch.where(up, a.cos(), 1 - a.cos())
    y = torch.where(up, a.sin(), 0.5 - a.sin())
    return torch.stack([x, y], 1) + 0.05 * torch.randn(n, 2, generator=g)


def diffusion_loss(net, x0, g):
    t = torch.randint(0, TIMESTEPS, (len(x0),), generator=g)
    eps = torch.randn(x0.shape, generator=g)
    xt = abar[t].sqrt()[:, None] * x0 + (1 - abar[t]).sqrt()[:, None] * eps
    return nn.functional.mse_loss(net(xt, t).float(), eps)


net = Denoiser()
ema = EMA(net, decay=0.999)
MODULES = [net, ema.shadow]
watch(*MODULES)
rng = torch.Generator().manual_seed(9)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, total_iters=20)

for step in range(120):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = diffusion_loss(net, moons(rng, 256), rng)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    warm.step()
    ema.update(net)
    if (step + 1) % 30 == 0:
        g_eval = torch.Generator().manual_seed(1000)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            ema_loss = diffusion_loss(ema.shadow, moons(g_eval, 512), g_eval)
        print(f"step {step + 1} train {loss.item():.4f} ema {ema_loss.item():.4f}")
