import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(82)
STEPS = 50


def schedule(steps):
    """cosine schedule with zero terminal signal-to-noise ratio"""
    f = torch.cos(torch.linspace(0, 1, steps) * torch.pi / 2)
    a = (f / f[0]).clamp(0, 1)
    a[-1] = 0.0
    return a, (1 - a ** 2).sqrt()


class VNet(nn.Module):
    def __init__(self, d=2, width=96):
        super().__init__()
        self.t = nn.Sequential(nn.Linear(3, 32), nn.SiLU())
        self.net = nn.Sequential(nn.Linear(d + 32, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(),
                                 nn.Linear(width, d))

    def forward(self, x, t, log_snr):
        tt = t.float() / STEPS
        e = self.t(torch.stack([tt, torch.sin(6.28 * tt), log_snr / 10], -1))
        return self.net(torch.cat([x.to(e.dtype), e], -1))


class EMA:
    def __init__(self, src, decay=0.98):
        self.m = VNet().requires_grad_(False)
        self.m.load_state_dict(src.state_dict())
        self.d = decay

    @torch.no_grad()
    def update(self, src):
        for a, b in zip(self.m.parameters(), src.parameters()):
            a.lerp_(b, 1 - self.d)


alpha, sigma = schedule(STEPS)
log_snr = 2 * (torch.log(alpha) - torch.log(sigma))          # +inf at the first and -inf at the last step
net = VNet()
ema = EMA(net)
MODULES = [net, ema.m]


def moons(g, n):
    th = 3.1416 * torch.rand(n, generator=g)
    side = (torch.rand(n, generator=g) < 0.5).float()
    x = torch.stack([th.cos() * (1 - 2 * side) + side - 0.5, th.sin() * (1 - 2 * side) + 0.25 * side], -1)
    return x + 0.05 * torch.randn(n, 2, generator=g)


@torch.no_grad()
def ddim(model, g, n=64, jump=7):
    x = torch.randn(n, 2, generator=g)
    for t in range(STEPS - 1, 0, -jump):
        tb = torch.full((n,), t)
        with torch.autocast("cpu", dtype=torch.float16):
            v = model(x, tb, log_snr[tb].clamp(-20, 20)).float()
        x0, eps = alpha[t] * x - sigma[t] * v, sigma[t] * x + alpha[t] * v
        s = max(t - jump, 0)
        x = alpha[s] * x0 + sigma[s] * eps
    return x


g = torch.Generator().manual_seed(820)
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu")
watch(*MODULES)
for it in range(1, 91):
    x0, noise = moons(g, 128), torch.randn(128, 2, generator=g)
    t = torch.randint(0, STEPS, (128,), generator=g)
    a, s = alpha[t, None], sigma[t, None]
    with torch.autocast("cpu", dtype=torch.float16):
        v = net(a * x0 + s * noise, t, log_snr[t].clamp(-20, 20))
        w = torch.sigmoid(-log_snr[t] + 2.0)
        loss = (w[:, None] * (v.float() - (a * noise - s * x0)) ** 2).mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    ema.update(net)
    if it % 30 == 0:
        smp = ddim(ema.m, torch.Generator().manual_seed(1))
        print(it, round(loss.item(), 4), "sample std", round(smp.std().item(), 3))
